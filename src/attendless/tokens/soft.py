"""Soft merging: every removed patch is spread over several of the others, by matrix products without sorting. Requires
no training.

    in each layer, after attention: the targets are n − r evenly spaced patches, the sources the r others
    W_ij = ReLU(cos(k_i, k_j) − threshold) / its sum over j, for source i and target j; keys are averaged over heads
    size of target j:   s_j + Σ_i W_ij s_i
    token of target j:  (s_j x_j + Σ_i W_ij s_i x_i) / its size

A source with no target above the threshold goes to its most similar target. The sum of the sizes and the size-weighted
mean of the tokens stay as they were. A cell belongs to the token that gets the largest part of it.

This is merging of the kind of MaMe (Huo and Li, 2026), which also consists of matrix products alone. It is not a
reproduction of MaMe, where the number of remaining tokens follows from the threshold. Here the schedule sets it, so
that shapes are static. The schedule's options are those of `tokens.schedule`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import options
from ..attention import Context, Grid, Macs
from ..sparse.merging import Merged, reowned
from .interface import SearchSpace
from .joining import joined, numbers, unit_keys
from .registry import register_reducer
from .schedule import ScheduledReducer, ScheduleOptions


@dataclasses.dataclass(frozen=True)
class SoftOptions(ScheduleOptions):
    threshold: float = options.option(0.8, "cosine above which a target gets a part of a patch", low=-1, high=1)


@register_reducer
class Soft(ScheduledReducer):
    name = "soft"
    Options = SoftOptions
    entries = frozenset({"keys"})
    spreads = True
    examples = ("soft", "soft:r=1/3", "soft:keep=0.3,start=1", "soft:r=2,threshold=0.2,prop_attn=false")
    search_space = SearchSpace("r", {"threshold": (0.6, 0.8, 0.9)})

    def macs(self, grid: Grid) -> Macs:
        r = 0 if self.returns else self.removing(grid.patches)
        return Macs(other=r * (grid.patches - r) * (self.head_dim + self.dim + 1))

    def merge(self, x: Tensor, context: Context) -> Merged:
        grid = context.grid
        n, r = grid.patches, self.removing(grid.patches)
        if not r:
            return joined(x, grid, numbers(x, n), r)
        targets = [number * n // (n - r) for number in range(n - r)]
        sources = sorted({*range(n)} - {*targets})
        with torch.no_grad():
            unit = unit_keys(context)
            weight = weights(unit[:, sources] @ unit[:, targets].transpose(1, 2), self.options.threshold)
        prefix, patches, cells = x[:, : grid.prefix], x[:, grid.prefix :], grid.places(x)
        size = patches.new_ones(patches.shape[:2]) if grid.sizes is None else grid.sizes.to(x.dtype)
        # One more column carries the sizes, so that one product gives sums and sizes.
        sums = torch.cat([patches * size[..., None], size[..., None]], dim=2)
        sums = sums[:, targets] + weight.transpose(1, 2).to(x.dtype) @ sums[:, sources]
        index = torch.empty_like(cells)
        index[:, targets], index[:, sources] = numbers(x, n - r), weight.argmax(dim=2)
        total = sums[..., -1]
        merged = torch.cat([prefix, sums[..., :-1] / total[..., None]], dim=1)
        return Merged(merged, total, cells[:, targets], reowned(index, cells, grid.owners, grid.area))


def weights(cosine: Tensor, threshold: float) -> Tensor:
    """The part of each source that each target gets [B, sources, targets], for their cosines. The parts of a source sum
    to 1."""
    above = (cosine - threshold).relu()
    nearest = (cosine == cosine.amax(dim=2, keepdim=True)).to(cosine.dtype)
    part = torch.where(above.sum(dim=2, keepdim=True) > 0, above, nearest)
    return part / part.sum(dim=2, keepdim=True)
