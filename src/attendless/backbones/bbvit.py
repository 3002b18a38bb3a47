"""BBViT ("'Sufficient' Attention Is All You Need"): a small isotropic ViT with BigBird's patterns, for small data sets.

Its released code differs from its ViT in more than the attention, and from a usual ViT in other ways:

    BBViT         q, k and v with biases, and no output projection: heads are laid side by side, and that is the output,
                  without dropout
    its ViT       q, k and v without biases, an output projection with one; dropout of weights and output
    both          the mean over all tokens, the class token among them, is normed and classified; there is no norm
                  before. Positions and class token start from N(0, 1), every other weight as PyTorch draws it

`out_proj` is therefore a separate argument. To compare attentions, use the same value for all of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .columnar import Columnar


class BBViT(Columnar):
    """`out_proj`: whether attentions end in an output projection, and in dropout."""

    def __init__(self, *args: Any, out_proj: bool = True, scratch: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, scratch=scratch, **kwargs)
        self.out_proj = out_proj
        if not out_proj:
            for block in self.blocks:
                block.attn.proj, block.attn.proj_drop = nn.Identity(), nn.Dropout(0.0)
        if scratch and kwargs.get("weight_init") != "skip":
            self.start()

    def start(self) -> None:
        """Draw the weights as the released code does."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
        for weight in (self.cls_token, self.pos_embed):
            if weight is not None:
                nn.init.normal_(weight)
        for block in self.blocks:
            block.attn.init_weights()
