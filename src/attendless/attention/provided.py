"""The class token's attention, a context entry that token reducers read as the importance of each token.

Shapes: B batch · H heads · N tokens · D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .values import Grid

#: The number of queries that stand for all queries where there is no class token.
POOLED = 16


def class_attention(q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
    """The class token's row of full attention, [B, H, N], from q and k [B, H, N, D].

    A grid without prefix tokens has no class token. There, the row is the mean of the rows of `POOLED` queries, each
    the mean query of a run of neighbouring tokens: nearly the attention that a token receives, for a fraction of its
    cost. One mean query of all tokens would favour other tokens than the single queries do.

    Half-precision tokens are compared in fp32: reducers rank them by small differences.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    bias = grid.key_bias(wide)
    few = q[:, :, :1] if grid.prefix else pooled(q)
    rows = torch.matmul(few.to(wide) * scale, k.to(wide).transpose(-2, -1))
    rows = torch.softmax(rows if bias is None else rows + bias[:, None, None], dim=-1)
    return rows[:, :, 0] if grid.prefix else rows.mean(2)


def pooled(q: Tensor) -> Tensor:
    """The mean queries of `POOLED` runs of neighbouring tokens, or all queries if there are no more: [B, H, ·, D]."""
    count = q.shape[2]
    if count <= POOLED:
        return q
    runs = torch.arange(count, device=q.device) * POOLED // count
    share = torch.nn.functional.one_hot(runs, POOLED).to(q.dtype).T
    return (share / share.sum(1, keepdim=True)) @ q


def class_attention_macs(grid: Grid, width: int) -> int:
    """Multiply-accumulates of `class_attention` for one image and heads of this width in total."""
    return grid.tokens * width * (1 if grid.prefix else min(POOLED, grid.tokens))
