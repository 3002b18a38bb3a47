"""Re-attention (DeepViT): full attention whose heads are mixed after the softmax.

    out = BN(Θ softmax(q kᵀ / √D)) v        Θ [H, H] a 1 × 1 convolution over the heads, BN a batch norm of each head

The maps of a ViT's deep layers become similar; mixing heads creates new maps. In a pretrained model Θ starts as the
identity; BN is the identity at the start only in evaluation. `scale` divides the maps after BN by √D, as the authors'
code does in DeepViT-S and -L, but not in its models of 16, 24 and 32 blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .. import options
from ..sparse.backend import Choice
from .interface import Attention
from .registry import register
from .values import Context, Grid


class Reattend(nn.Module):
    """Maps [B, H, …, N, M] with mixed and batch-normalised heads."""

    def __init__(self, heads: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(heads, heads, 1, **factory)
        self.bn = nn.BatchNorm2d(heads, **factory)
        with torch.no_grad():
            self.conv.weight.copy_(torch.eye(heads)[:, :, None, None])
            self.conv.bias.zero_()  # type: ignore[union-attr]

    def init_weights(self) -> None:
        self.conv.reset_parameters()

    def forward(self, weights: Tensor) -> Tensor:
        flat = weights.flatten(2, -2)
        return self.bn(self.conv(flat)).view_as(weights)


@dataclasses.dataclass(frozen=True)
class ReattentionOptions(options.Options):
    scale: bool = options.option(False, "divide the mixed maps by the square root of the head width")


@register
class Reattention(Attention):
    name = "reattention"
    Options = ReattentionOptions
    examples = ("reattention", "reattention:scale")
    provides = frozenset({"scores", "keys"})
    takes = frozenset({"residual"})
    rows_sum_to_one = False

    def setup(self, factory: dict[str, Any]) -> None:
        self.reattn = Reattend(self.num_heads, factory)

    def init_weights(self) -> None:
        self.reattn.init_weights()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        scores = self.scale * q @ k.transpose(-2, -1)
        scores = scores if context.residual is None else scores + context.residual
        weights = self.reattn(torch.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training))
        weights = weights * self.scale if self.options.scale else weights
        return weights @ v, context.replace(scores=scores)

    def core_macs(self, grid: Grid) -> int:
        return grid.tokens**2 * (2 * self.attn_dim + self.num_heads**2)

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return Choice("torch", "plain PyTorch: mixing heads requires explicit maps")
