"""LV-ViT: an isotropic backbone with a convolutional stem and a second classifier for patches.

    stem      7 × 7 at stride 2, 3 × 3, 3 × 3, each with BatchNorm and ReLU; then patches of half the size
    blocks    x + branch(norm x) / skip: each branch is divided by a constant, which stabilises training of deep models
    output    head(class token) + ½ max over patches of aux_head(patch)

In training the output is that of the class token alone; token labelling (`train.labelling`) trains `patch_logits` in
addition. Weights have the authors' names. After token reduction, the maximum is over the remaining tokens.
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
            raise UserError(f"global_pool={self.global_pool!r}: LV-ViT classifies its class token, expected 'token'")
        self.aux_head = _head_like(self.head)

    def patch_logits(self, x: Tensor) -> Tensor:
        """Logits of each patch of the normed tokens x [B, N, C]: [B, n, classes]."""
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
    """A newly initialised classifier of the same shape."""
    if not isinstance(head, nn.Linear):
        return nn.Identity()
    made = nn.Linear(head.in_features, head.out_features, device=head.weight.device, dtype=head.weight.dtype)
    if not made.weight.is_meta:
        trunc_normal_(made.weight, std=0.02)
        nn.init.zeros_(made.bias)
    return made
