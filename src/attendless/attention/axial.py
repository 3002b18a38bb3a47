"""Axial attention: each patch attends to its row and its column.

    out_i = softmax(q_i K_S(i)ᵀ / √D) V_S(i)        S(i) = row(i) ∪ column(i) ∪ prefix

There is one softmax over both, in which the patch itself counts once. Two layers connect all patches. Prefix tokens are
global: they attend to all tokens, and every patch attends to them.

The computation reshapes the grid: the scores of rows and of columns are separate small products, concatenated for the
softmax. Cost grows with N·(height + width) instead of N².

Shapes: B batch · H heads · N tokens · D head width · h, w height and width of the grid · P prefix tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..sparse.backend import Choice
from ..sparse.blocks import few_at_a_time
from ..sparse.full import attend as full
from .interface import Attention
from .registry import register
from .values import Context, Grid

#: Number of scores computed at a time on a CPU: one megabyte.
_SCORES = 2**18


def axial(
    q: Tensor, k: Tensor, v: Tensor, height: int, width: int, *, prefix: int = 0, scale: float, dropout: float = 0.0
) -> Tensor:
    """q, k, v [B, H, P + h·w, ·] → [B, H, P + h·w, ·]."""
    run = partial(_axial, height=height, width=width, prefix=prefix, scale=scale, dropout=dropout)
    scores = q.shape[1] * height * width * (height + width + prefix)
    return few_at_a_time(run, _SCORES // scores, q, k, v)


def _axial(
    q: Tensor, k: Tensor, v: Tensor, height: int, width: int, prefix: int, scale: float, dropout: float
) -> Tensor:
    q_hw, k_hw, v_hw = (x[:, :, prefix:].unflatten(2, (height, width)) for x in (q * scale, k, v))
    k_P, v_P = k[:, :, None, :prefix], v[:, :, None, :prefix]

    along_row = q_hw @ k_hw.mT
    along_column = q_hw.transpose(2, 3) @ k_hw.transpose(2, 3).mT
    # A patch lies in its row and in its column; it counts in its row.
    itself = torch.eye(height, dtype=torch.bool, device=q.device)
    along_column = along_column.masked_fill(itself, -torch.inf).transpose(2, 3)
    scores = torch.cat([along_row, along_column, q_hw @ k_P.mT], dim=-1)

    weights = F.dropout(scores.softmax(dim=-1), dropout)
    row, column, front = weights.split([width, height, prefix], dim=-1)
    out = row @ v_hw + (column.transpose(2, 3) @ v_hw.transpose(2, 3)).transpose(2, 3)
    if not prefix:
        return out.flatten(2, 3)
    out = (out + front @ v_P).flatten(2, 3)
    return torch.cat([full(q[:, :, :prefix], k, v, scale=scale, dropout=dropout), out], dim=2)


@register
class Axial(Attention):
    name = "axial"
    provides = frozenset({"class_attention", "keys"})
    examples = ("axial",)
    executes_more = "the product along a column contains the patch itself a second time, and masks it"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        out = axial(q, k, v, grid.height, grid.width, prefix=grid.prefix, scale=self.scale, dropout=self.dropout)
        return out, context

    def core_macs(self, grid: Grid) -> int:
        pairs = grid.patches * (grid.height + grid.width - 1 + grid.prefix) + grid.prefix * grid.tokens
        return 2 * pairs * self.attn_dim

    def refuses(self, grid: Grid) -> str | None:
        return "a row or column needs all its cells; tokens were dropped or merged" if grid.reduced else None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return Choice("rows+columns", f"{grid.height} rows and {grid.width} columns, cut by reshaping")
