"""Efficient attention (Shen et al.): sum the tokens by channel first, then weight the sums for every token.

    out = softmax_D(q) (softmax_N(k)ᵀ v)        over the channels of a query; over the tokens of a channel

Each channel of k weights all tokens, and kᵀ v holds the D resulting summaries; a query weights the summaries. No N × N
matrix is computed: cost is linear in N. The publication and the fair comparison have the same form, per head and
without a scale (4.480 G at patch 4). There are no token-to-token weights, so attention dropout has no effect.

Prefix tokens are treated like patches. A token that represents s tokens counts s times.
Shapes: B batch · H heads · N tokens · D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .interface import Attention
from .registry import register
from .values import Context, Grid


def efficient(q: Tensor, k: Tensor, v: Tensor, *, key_bias: Tensor | None = None) -> Tensor:
    """q, k [B, H, N, D], v [B, H, N, ·], key_bias [B, N] → [B, H, N, ·]."""
    if key_bias is not None:
        k = k + key_bias[:, None, :, None]
    summaries = torch.softmax(k, dim=-2).transpose(-2, -1) @ v
    return torch.softmax(q, dim=-1) @ summaries


@register
class Efficient(Attention):
    name = "efficient"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        return efficient(q, k, v, key_bias=context.grid.key_bias(k.dtype)), context

    def core_macs(self, grid: Grid) -> int:
        return 2 * grid.tokens * self.attn_dim * self.head_dim

    def refuses(self, grid: Grid) -> str | None:
        return None
