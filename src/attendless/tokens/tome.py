"""ToMe: similar tokens are merged, and a merged token is weighted by its number of patches. Requires no training.

    in each layer, after attention: the r pairs of patches with the most similar keys merge (`sparse.merging`)
    softmax(q kᵀ / √D + log s): a merged key weighs as much as the s tokens it stands for

The schedule's options are those of `tokens.schedule`. `window` merges only within windows of the grid, so that the
search is linear in the number of tokens; frames of a video are stacked into one tall grid. `protect` spares patches
with much attention of the class token: it subtracts protect · log(attention) of the patch that would be merged from the
similarity of a pair. `prop_attn=false` leaves out log s, as the authors do for models pretrained with MAE.

The patches 1, 3, 5, … merge into the patches 0, 2, 4, … whatever the number of prefix tokens. The authors divide the
sequence with its prefix, and never merge a class or distillation token. Theirs is the same division with a class token
alone. With no class token, or with a class and a distillation token, their patches 0, 2, 4, … merge into 1, 3, 5, ….
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
from .schedule import ScheduledReducer, ScheduleOptions


@dataclasses.dataclass(frozen=True)
class ToMeOptions(ScheduleOptions):
    window: int = options.option(0, "merge only within windows of this many patches a side; 0: anywhere", low=0)
    protect: float = options.option(0.0, "weight of the class token's attention against merging a patch", low=0)


@register_reducer
class ToMe(ScheduledReducer):
    name = "tome"
    Options = ToMeOptions
    examples = (
        *("tome", "tome:r=1/3", "tome:keep=0.3,start=1", "tome:r=2,window=2", "tome:r=3,protect=0.1"),
        "tome:r=2,prop_attn=false",
    )
    search_space = SearchSpace("r", {"protect": (0.0, 0.05, 0.1, 0.2)})

    def setup(self) -> None:
        self.entries = frozenset({"keys", "class_attention"} if self.options.protect else {"keys"})
        super().setup()

    def most(self, patches: int) -> int:
        return patches // 2  # each needs a partner

    def plan(self, grid: Grid) -> Merging:
        given, patches = self.options, grid.patches
        rows = grid.depth * grid.height  # frames are stacked into one tall grid
        return Merging(
            rows, grid.width, grid.prefix, patches, self.removing(patches), given.window, protect=given.protect
        )

    def macs(self, grid: Grid) -> Macs:
        return Macs() if self.returns else Macs(other=merging.macs(self.plan(grid), self.head_dim))

    def merge(self, x: Tensor, context: Context) -> Merged:
        grid, importance = context.grid, context.class_attention
        assert context.keys is not None
        return operations.merge(
            x,
            context.keys,
            self.plan(grid),
            importance=None if importance is None else importance.mean(1),
            sizes=grid.sizes,
            cells=grid.cells,
            owners=grid.owners,
        )
