"""The class token's attention, a context entry that token reducers read.

Shapes: B batch · H heads · N tokens · D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .values import Grid


def class_attention(q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
    """The class token's row of full attention, [B, H, N], from q and k [B, H, N, D].

    A grid without prefix tokens has no class token; there the mean of all queries replaces its query.
    """
    first = q[:, :, :1] if grid.prefix else q.mean(2, keepdim=True)
    row, bias = scale * first @ k.transpose(-2, -1), grid.key_bias(q.dtype)
    return torch.softmax(row if bias is None else row + bias[:, None, None], dim=-1)[:, :, 0]
