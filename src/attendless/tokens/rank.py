"""Importance first: the least important patches merge into the most similar of the others. Requires no training.

    in each layer, after attention: importance of a patch = the class token's attention to it, averaged over heads
    the r least important patches merge, each into the patch with the largest cosine among those that stay
    softmax(q kᵀ / √D + log s): a merged key weighs as much as the s tokens it stands for

Tokens are compared by themselves, not by their keys, because the residual stream is what merging averages. A model
without a class token ranks patches by the attention that they receive (`attention.provided`).

The schedule's options are those of `tokens.schedule`. Unless `start` or a number for each layer is given, the first
sixth of the layers removes nothing: the class token's attention says little there. `window` merges only within windows
of the grid; frames of a video are stacked into one tall grid.

`tome` chooses pairs by similarity alone, and every second patch can never be chosen. The importance of one patch is
more reliable than the similarity of a pair in deep layers, and comparing removed with remaining patches costs fewer
products than comparing one half with the other.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from .. import options
from ..attention import Context, Grid, Macs
from ..sparse import merging, operations
from ..sparse.merging import Merged, Merging
from .interface import SearchSpace
from .registry import register_reducer
from .schedule import AFTER_A_SIXTH, ScheduledReducer, ScheduleOptions


@dataclasses.dataclass(frozen=True)
class RankOptions(ScheduleOptions):
    start: int = options.option(
        AFTER_A_SIXTH, "first layer that removes tokens; -1: the first sixth of the layers removes none", low=-1
    )
    window: int = options.option(0, "merge only within windows of this many patches a side; 0: anywhere", low=0)


@register_reducer
class Rank(ScheduledReducer):
    name = "rank"
    Options = RankOptions
    entries = frozenset({"class_attention"})
    examples = ("rank", "rank:r=1/3", "rank:keep=0.3,start=1", "rank:r=2,window=2", "rank:r=2,prop_attn=false")
    search_space = SearchSpace("r")

    def plan(self, grid: Grid) -> Merging:
        removed = self.removing(grid.patches)
        rows = grid.depth * grid.height  # frames are stacked into one tall grid
        return Merging(rows, grid.width, grid.prefix, grid.patches, removed, self.options.window, sources=removed)

    def macs(self, grid: Grid) -> Macs:
        removes = not self.returns and self.removing(grid.patches) > 0
        return Macs(other=merging.macs(self.plan(grid), self.dim)) if removes else Macs()

    def merge(self, x: Tensor, context: Context) -> Merged:
        grid = context.grid
        assert context.class_attention is not None
        return operations.merge(
            x,
            x,
            self.plan(grid),
            importance=context.class_attention.mean(1),
            sizes=grid.sizes,
            cells=grid.cells,
            owners=grid.owners,
        )
