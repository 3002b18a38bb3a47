"""Weights and averages over the tokens of a whole grid, adapted to a grid whose tokens were dropped or merged.

    column of a remaining token = mean of the columns of the cells it represents × its weight in attention

Weighted by its size, the column of a merged token is the sum of the columns of its tokens, so that W k and A W are
unchanged if these tokens are equal. Every image has its own tokens then, and therefore its own rows.

Shapes: B batch · N tokens of the whole grid, n of them left, prefix first · R rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..sparse import basis
from .values import Grid


def budget(keep: float, grid: Grid) -> int:
    """⌈keep · tokens of the whole grid⌉ keys, at least 1 and at most those left; the small subtrahend keeps rounding
    errors of a whole product from being rounded up."""
    return min(grid.tokens, max(1, math.ceil(keep * grid.whole().tokens - 1e-9)))


def on_tokens(rows: Tensor, grid: Grid) -> Tensor:
    """Rows [R, N] over the tokens of the whole grid → over the remaining ones [B, 1, R, n]; unchanged if all remain."""
    if grid.cells is None:
        return rows
    images, P = grid.cells.shape[0], grid.prefix
    means = grid.averaged(rows[:, P:].T.expand(images, -1, -1)).mT
    if grid.weights is not None:
        means = means * grid.weights[:, None].to(rows.dtype)
    return torch.cat([rows[:, :P].expand(images, -1, -1), means], dim=-1)[:, None]


def averaging(rows: Tensor, grid: Grid) -> Tensor:
    """Like `on_tokens` for rows that average: the remaining tokens are rescaled for those that were dropped."""
    if grid.cells is None:
        return rows
    left = on_tokens(rows.abs(), grid).sum(-1, keepdim=True)
    whole = rows.abs().sum(-1, keepdim=True)
    return on_tokens(rows, grid) * (whole / left.where(left > 1e-4 * whole, whole))


def rest(grid: Grid, rank: int, like: Tensor) -> basis.Rest:
    """`rank` averages over cells of the grid for keys that were not chosen, with type and device of `like`."""
    found = basis.rest(grid.height, grid.width, grid.prefix, rank, like)
    if grid.cells is None:
        return found
    share = on_tokens(found.share.T, grid)
    total = share.sum(-1, keepdim=True)
    return basis.Rest(share / total.where(total > 0, 1), share.mT)
