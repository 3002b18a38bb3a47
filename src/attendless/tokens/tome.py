"""ToMe: tokens that are alike become one, and count for as many as they stand for. It needs no training.

    in each layer, after attention: the r pairs of patches with the most similar keys merge (`sparse.merging`)
    softmax(q kᵀ / √D + log s): a merged key weighs as much as the s tokens it stands for

`keep` says what share of the patches is left in the end, whatever the image size: the same share goes in every layer.
`r` says instead how many tokens go in each layer: one number for all, two for a straight line from the first to the
last, or one per layer. `start` leaves the layers before alone; `until` puts every token back in its place before that
layer, as a copy of what it had become part of, for dense heads that want the last layers at full resolution. `window`
lets a token merge only within its own window of the grid, which costs in proportion to the tokens. `protect` spares
what the class token looks at: it lowers a pair's similarity by so many times the log of its attention to the patch that
would go.
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
    until: int = options.option(0, "layer before which all are put back on the grid; 0: none", low=0)
    window: int = options.option(0, "merge only within windows of so many patches a side; 0: anywhere", low=0)
    protect: float = options.option(0.0, "how much the class token's attention keeps a patch from being merged", low=0)


@register_reducer
class ToMe(Reducer):
    name = "tome"
    Options = ToMeOptions
    examples = ("tome", "tome:r=1/3", "tome:keep=0.3,start=1", "tome:r=2,window=2", "tome:r=3,protect=0.1")
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
        """How many of so many patches go in this layer: half of them at most, since each needs a partner."""
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
        return found.x, context.replace(grid=left)


def span(given: ToMeOptions, depth: int) -> range:
    """The layers that may merge."""
    return range(given.start, given.until or depth)


def merged(given: ToMeOptions, layer: int, depth: int) -> int:
    """How many tokens `r` lets go in a layer, however many there are."""
    layers = span(given, depth)
    if layer not in layers or not given.r:
        return 0
    if len(given.r) == 1:
        return given.r[0]
    if len(given.r) == 2:
        first, last = given.r
        return round(first + (last - first) * (layer - given.start) / max(1, len(layers) - 1))
    if len(given.r) != depth:
        text = f"tome:r={options.value_text(given.r)} names {len(given.r)} layers, but the model has {depth}"
        raise UserError(f"{text}: expected 1, 2 or {depth} numbers")
    return given.r[layer]
