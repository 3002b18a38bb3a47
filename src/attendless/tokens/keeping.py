"""Keep the patches with the highest scores: the part that reducers which select rather than merge share.

Shapes: B batch · N tokens, prefix first · n patches · C width.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..attention import Grid
from ..sparse.merging import reowned


def keep(x: Tensor, grid: Grid, score: Tensor, staying: int, *, fuse: bool = False) -> tuple[Tensor, Grid]:
    """The prefix tokens of x [B, N, C] and, in their order, the `staying` patches with the highest score [B, n]; and
    the reduced grid. With `fuse`, Σ score · x of the other patches becomes one more token, the last."""
    prefix, patches = x[:, : grid.prefix], x[:, grid.prefix :]
    order = score.argsort(dim=1, descending=True, stable=True)
    kept, gone = order[:, :staying].sort(dim=1).values, order[:, staying:]
    cells, tokens, fused_to = grid.places(x), [prefix, _take(patches, kept)], -1
    places = [cells.gather(1, kept)]
    if fuse:
        weight = score.gather(1, gone)[..., None]
        tokens.append((_take(patches, gone) * weight).sum(1, keepdim=True).to(x.dtype))  # scores may be fp32
        # The fused token gets the cell of its patch with the highest score, for attentions that need a position.
        places.append(cells.gather(1, gone[:, :1]))
        fused_to = staying
    numbers = torch.arange(staying, device=x.device).expand_as(kept)
    index = kept.new_full(score.shape, fused_to).scatter(1, kept, numbers)
    owners = reowned(index, cells, grid.owners, grid.area)
    left = dataclasses.replace(grid, cells=torch.cat(places, dim=1), sizes=None, owners=owners)
    return torch.cat(tokens, dim=1), left


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
