"""The schedule that merging reducers share: how many tokens each layer removes, and where all tokens return.

`keep` is the share of the patches left after the last layer, at every image size: every layer removes the same share.
`r` gives instead the number of tokens removed in each layer: one number for all layers, two for a linear schedule from
the first to the last, rounded down, or one per layer. `start` is the first layer that removes tokens; `until` restores
every token before that layer, as a copy of its merged token, for dense heads that require the last layers at full
resolution. `prop_attn=false` leaves the number of patches that a token represents out of the softmax; a mean over the
patches still weights a merged token by it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .. import options
from ..attention import Context, Grid
from ..errors import UserError
from ..sparse.merging import Merged
from .interface import Reducer

#: A `start` that leaves the first sixth of the layers alone.
AFTER_A_SIXTH = -1


@dataclasses.dataclass(frozen=True)
class ScheduleOptions(options.Options):
    keep: float = options.option(
        0.5, "share of the patches left after the last layer, unless r is given", low=0, high=1
    )
    r: tuple[int, ...] = options.option((), "tokens removed in each layer: N, FIRST/LAST, or one per layer", low=0)
    start: int = options.option(0, "first layer that removes tokens", low=0)
    until: int = options.option(0, "layer before which all tokens are restored to the grid; 0: none", low=0)
    prop_attn: bool = options.option(True, "weight a merged token by its number of patches in attention")


class ScheduledReducer(Reducer):
    """A reducer that merges `removing(grid.patches)` patches in its layer. A mechanism defines `merge`."""

    Options = ScheduleOptions
    #: Context entries that `merge` reads.
    entries: frozenset[str] = frozenset()

    def setup(self) -> None:
        given = self.options
        self.first = self.returns = bool(given.until) and self.layer == given.until
        self.reads = frozenset() if self.returns else self.entries

    def merge(self, x: Tensor, context: Context) -> Merged:
        """The tokens that remain of x [B, N, C], and what each represents."""
        raise NotImplementedError(f"{type(self).__name__} does not define merge")

    def most(self, patches: int) -> int:
        """The most patches that one layer can remove."""
        return max(0, patches - 1)

    @classmethod
    def layers(cls, given: Any, depth: int) -> list[int]:
        first = first_layer(given, depth)
        if given.until and not first < given.until < depth:
            layers = f"a layer after start={first} and up to {depth - 1}, the last"
            raise UserError(f"{cls.name}:until={given.until} does not fit the model: expected {layers}, or 0")
        everywhere = given.keep < 1 and not given.r
        found = [layer for layer in span(given, depth) if everywhere or scheduled(cls.name, given, layer, depth)]
        return [*found, given.until] if found and given.until else found

    def removing(self, patches: int) -> int:
        """The number of patches that this layer removes."""
        given = self.options
        if given.r:
            return min(scheduled(self.name, given, self.layer, self.depth), self.most(patches))
        share = given.keep ** (1 / len(span(given, self.depth)))
        return min(patches - round(patches * share), self.most(patches))

    def remaining(self, grid: Grid) -> int:
        return grid.area if self.returns else grid.patches - self.removing(grid.patches)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        if self.returns:
            return grid.restore(x), context.replace(grid=grid.whole())
        found = self.merge(x, context)
        left = dataclasses.replace(
            grid,
            cells=found.cells,
            sizes=found.sizes,
            owners=found.owners,
            weighting="size" if self.options.prop_attn else "none",
        )
        return found.x, context.replace(grid=left)


def span(given: ScheduleOptions, depth: int) -> range:
    """The layers that may remove tokens."""
    return range(first_layer(given, depth), given.until or depth)


def first_layer(given: ScheduleOptions, depth: int) -> int:
    """The first layer that may remove tokens."""
    if given.start != AFTER_A_SIXTH:
        return given.start
    return 0 if len(given.r) > 2 else depth // 6  # numbers for each layer say it themselves


def scheduled(name: str, given: ScheduleOptions, layer: int, depth: int) -> int:
    """The number of tokens that `r` removes in a layer, before the limit of what the layer has."""
    layers = span(given, depth)
    if layer not in layers or not given.r:
        return 0
    if len(given.r) == 1:
        return given.r[0]
    if len(given.r) == 2:
        first, last = given.r
        step = (last - first) / max(1, len(layers) - 1)
        return int(first + step * (layer - layers.start))  # computed in this order, so that rounding errors agree too
    if len(given.r) != depth:
        text = f"{name}:r={options.value_text(given.r)} names {len(given.r)} layers, but the model has {depth}"
        raise UserError(f"{text}: expected 1, 2 or {depth} numbers")
    return given.r[layer]
