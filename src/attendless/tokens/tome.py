"""ToMe: similar tokens are merged, and a merged token is weighted by its number of patches. Requires no training.

    in each layer, after attention: the r pairs of patches with the most similar keys merge (`sparse.merging`)
    softmax(q kᵀ / √D + log s): a merged key weighs as much as the s tokens it stands for

`keep` is the share of the patches left after the last layer, at every image size: every layer merges the same share.
`r` gives instead the number of tokens merged in each layer: one number for all layers, two for a linear schedule from
the first to the last, rounded down, or one per layer. `start` is the first layer that merges; `until` restores every
token before that layer, as a copy of its merged token, for dense heads that require the last layers at full resolution.
`window` merges only within windows of the grid, so that the search is linear in the number of tokens; frames of a video
are stacked into one tall grid. `protect` spares patches with much attention of the class token: it subtracts
protect · log(attention) of the patch that would be merged from the similarity of a pair. `prop_attn=false` leaves out
log s, as the authors do for models pretrained with MAE; a mean over the patches still weights a merged token by s.

The patches 1, 3, 5, … merge into the patches 0, 2, 4, … whatever the number of prefix tokens. The authors divide the
sequence with its prefix, and never merge a class or distillation token. Theirs is the same division with a class token
alone. With no class token, or with a class and a distillation token, their patches 0, 2, 4, … merge into 1, 3, 5, ….
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from .. import options
from ..attention import Context, Grid, Macs
from ..errors import UserError
from ..sparse import merging, operations
from ..sparse.merging import Merging
from .interface import Reducer, SearchSpace
from .registry import register_reducer


@dataclasses.dataclass(frozen=True)
class ToMeOptions(options.Options):
    keep: float = options.option(
        0.5, "share of the patches left after the last layer, unless r is given", low=0, high=1
    )
    r: tuple[int, ...] = options.option((), "tokens merged in each layer: N, FIRST/LAST, or one per layer", low=0)
    start: int = options.option(0, "first layer that merges", low=0)
    until: int = options.option(0, "layer before which all tokens are restored to the grid; 0: none", low=0)
    window: int = options.option(0, "merge only within windows of this many patches a side; 0: anywhere", low=0)
    protect: float = options.option(0.0, "weight of the class token's attention against merging a patch", low=0)
    prop_attn: bool = options.option(True, "weight a merged token by its number of patches in attention")


@register_reducer
class ToMe(Reducer):
    name = "tome"
    Options = ToMeOptions
    examples = (
        *("tome", "tome:r=1/3", "tome:keep=0.3,start=1", "tome:r=2,window=2", "tome:r=3,protect=0.1"),
        "tome:r=2,prop_attn=false",
    )
    search_space = SearchSpace("r", {"protect": (0.0, 0.05, 0.1, 0.2)})

    def setup(self) -> None:
        given = self.options
        self.first = self.returns = bool(given.until) and self.layer == given.until
        reads = {"keys", "class_attention"} if given.protect else {"keys"}
        self.reads = frozenset() if self.returns else frozenset(reads)

    @classmethod
    def layers(cls, given: ToMeOptions, depth: int) -> list[int]:
        if given.until and not given.start < given.until < depth:
            layers = f"a layer after start={given.start} and up to {depth - 1}, the last"
            raise UserError(f"tome:until={given.until} does not fit the model: expected {layers}, or 0")
        everywhere = given.keep < 1 and not given.r
        found = [layer for layer in span(given, depth) if everywhere or merged(given, layer, depth)]
        return [*found, given.until] if found and given.until else found

    def remaining(self, grid: Grid) -> int:
        return grid.area if self.returns else grid.patches - self.merging(grid.patches)

    def merging(self, patches: int) -> int:
        """The number of patches merged away in this layer: at most half of them, since each needs a partner."""
        given = self.options
        if given.r:
            return min(merged(given, self.layer, self.depth), patches // 2)
        share = given.keep ** (1 / len(span(given, self.depth)))
        return min(patches - round(patches * share), patches // 2)

    def plan(self, grid: Grid) -> Merging:
        given, patches = self.options, grid.patches
        rows = grid.depth * grid.height  # frames are stacked into one tall grid
        return Merging(rows, grid.width, grid.prefix, patches, self.merging(patches), given.window, given.protect)

    def macs(self, grid: Grid) -> Macs:
        return Macs() if self.returns else Macs(other=merging.macs(self.plan(grid), self.head_dim))

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, importance = context.grid, context.class_attention
        if self.returns:
            return grid.restore(x), context.replace(grid=grid.whole())
        assert context.keys is not None
        found = operations.merge(
            x,
            context.keys,
            self.plan(grid),
            importance=None if importance is None else importance.mean(1),
            sizes=grid.sizes,
            cells=grid.cells,
            owners=grid.owners,
        )
        left = dataclasses.replace(grid, cells=found.cells, sizes=found.sizes, owners=found.owners)
        left = dataclasses.replace(left, proportional=self.options.prop_attn)
        return found.x, context.replace(grid=left)


def span(given: ToMeOptions, depth: int) -> range:
    """The layers that may merge."""
    return range(given.start, given.until or depth)


def merged(given: ToMeOptions, layer: int, depth: int) -> int:
    """The number of tokens that `r` merges in a layer, before the limit of half of the patches."""
    layers = span(given, depth)
    if layer not in layers or not given.r:
        return 0
    if len(given.r) == 1:
        return given.r[0]
    if len(given.r) == 2:
        first, last = given.r
        step = (last - first) / max(1, len(layers) - 1)
        return int(first + step * (layer - given.start))  # computed in this order, so that rounding errors agree too
    if len(given.r) != depth:
        text = f"tome:r={options.value_text(given.r)} names {len(given.r)} layers, but the model has {depth}"
        raise UserError(f"{text}: expected 1, 2 or {depth} numbers")
    return given.r[layer]
