"""Full attention: every token looks at every token.

    out = softmax(q kᵀ / √D + log s) v

s counts the tokens a key stands for: 1, unless tokens were merged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .contract import Attention, Choice, Context, Grid
from .registry import register


def full(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_bias: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """q [B, H, N, D], k and v [B, H, M, ·], key_bias [B, M] → [B, H, N, ·], by PyTorch's fused kernel."""
    mask = None if key_bias is None else key_bias[:, None, None, :].to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


@register
class Full(Attention):
    name = "full"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        bias = context.grid.key_bias(q.dtype)
        if "scores" in context.wants:
            context = context.replace(scores=self.scale * q @ k.transpose(-2, -1))
        if "class_attention" in context.wants:
            row = self.scale * q[:, :, :1] @ k.transpose(-2, -1)
            row = row if bias is None else row + bias[:, None, None]
            context = context.replace(class_attention=torch.softmax(row, dim=-1)[:, :, 0])
        dropout = self.attn_drop.p if self.training else 0.0
        return full(q, k, v, scale=self.scale, key_bias=bias, dropout=dropout), context

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """softmax(q kᵀ / √D + log s), at once."""
        q, k, _ = self.project(x)
        rows, bias = slice(query, query + 1) if isinstance(query, int) else query, context.grid.key_bias(q.dtype)
        score = self.scale * q[:, :, rows] @ k.transpose(-2, -1)
        return torch.softmax(score if bias is None else score + bias[:, None, None], dim=-1)

    def core_macs(self, grid: Grid) -> int:
        return 2 * grid.tokens**2 * self.attn_dim

    def refuses(self, grid: Grid) -> str | None:
        return None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return Choice("sdpa", "full attention runs in PyTorch's fused kernel")
