"""LV-ViT: a columnar backbone whose patches come from a few convolutions, and which answers for every patch.

    stem      7 × 7 at stride 2, 3 × 3, 3 × 3, each with BatchNorm and ReLU; then patches of half the size
    blocks    x + branch(norm x) / skip: each branch is divided by a constant, which lets a deep model train
    answer    head(class token) + ½ max over patches of aux_head(patch)

In training the answer is the class token's alone, and `patch_logits` is what token labelling teaches beside it
(`train.labelling`). Weights have their authors' names; what else a columnar backbone can do, this one does. Where
tokens were reduced, the maximum is over those left.
"""

from __future__ import annotations

from typing import Any

from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..errors import UserError
from .stemmed import Stemmed


class LVViT(Stemmed):
    """`Stemmed`, with a head for its patches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.global_pool != "token":
            raise UserError(f"global_pool={self.global_pool!r}: LV-ViT answers from its class token, expected 'token'")
        self.aux_head = _head_like(self.head)

    def patch_logits(self, x: Tensor) -> Tensor:
        """What each patch of the normed tokens x [B, N, C] answers: [B, n, classes]."""
        return self.aux_head(x[:, self.num_prefix_tokens :])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        answer = super().forward_head(x, pre_logits=pre_logits)
        if self.training or pre_logits or self.num_classes == 0:
            return answer
        return answer + 0.5 * self.patch_logits(x).amax(1)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = _head_like(self.head).train(self.training)


def _head_like(head: nn.Module) -> nn.Module:
    """Another classifier of the same shape, at its start."""
    if not isinstance(head, nn.Linear):
        return nn.Identity()
    made = nn.Linear(head.in_features, head.out_features, device=head.weight.device, dtype=head.weight.dtype)
    if not made.weight.is_meta:
        trunc_normal_(made.weight, std=0.02)
        nn.init.zeros_(made.bias)
    return made
