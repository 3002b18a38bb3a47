"""Importance first: the least important patches merge into the most similar of the others. Requires no training.

    in each layer, after attention: importance of a patch = the class token's attention to it, averaged over heads
    candidates = the 1.5 r least important patches, but no more than 35 % of all unless r is more
    each candidate is compared with the patches that are not candidates
    the r candidates with the largest cosine − 0.1 · log(importance) merge into their most similar patch
    a merged token is the mean weighted by importance, of the mean length (`sparse.merging`)
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

#: Candidates for each patch that merges, their largest share of all patches, and the weight of importance against
#: similarity among them. Chosen on images that no table of results uses. With more candidates too few patches remain
#: for them to join.
_CANDIDATES, _MOST, _PROTECT = 1.5, 0.35, 0.1


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
        removed, patches = self.removing(grid.patches), grid.patches
        sources = min(round(_CANDIDATES * removed), max(removed, int(_MOST * patches)))
        rows = grid.depth * grid.height  # frames are stacked into one tall grid
        window = self.options.window
        return Merging(rows, grid.width, grid.prefix, patches, removed, window, sources=sources, protect=_PROTECT)

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
