"""The interface of token reducers. Most work in a block between attention and MLP:

    x + attention → reducer → MLP: everything after the reducer computes with fewer tokens

or, with `first`, before the attention. A reducer leaves prefix tokens unchanged. It returns the remaining tokens and a
context whose grid holds, per image, the cell of each token (`cells`), the number of patches it represents (`sizes`) and
the token that represents each cell (`owners`), so that `Grid.restore` can put the result back on the whole grid. The
number of remaining tokens depends on the grid alone: shapes are static, costs can be counted without running the model,
and compilers see fixed sizes.

One spec (`tome:r=8`) describes a whole model: the class chooses the layers in which it works, and the module in each of
them knows the number of its layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..attention import Context, Grid, Macs, Spec
from ..attention.values import ENTRIES
from ..errors import UserError
from ..options import Options as BaseOptions


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """How `tune` varies a reducer.

    schedule: the option that takes the number of tokens to remove in each layer, one integer for each layer.
    options: further options worth trying, with their values. The search tries one option at a time.
    """

    schedule: str
    options: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


class Reducer(nn.Module):
    """A token reducer: `forward(x_BNC, context) -> (x_BnC, context)`, the context with the reduced grid.

    A mechanism is a subclass that sets `name` and `Options` and defines `layers`, `remaining` and `forward`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    #: Context entries that the attention of the same block must provide, such as `class_attention`.
    reads: frozenset[str] = frozenset()
    #: Whether the reducer works before the block's attention rather than between attention and MLP.
    first: bool = False
    #: Whether cells may lose their token, so that no other token represents them.
    drops: bool = False
    #: Whether a patch may be divided among several tokens, so that `sizes` are sums of parts.
    spreads: bool = False
    #: Specs worth trying: the interface tests run each of them, and `attendless list` prints them.
    examples: ClassVar[tuple[str, ...]] = ()
    #: How `tune` varies the reducer; None: `tune` takes the reducer as given, for the reason in `not_searched`.
    search_space: ClassVar[SearchSpace | None] = None
    not_searched: ClassVar[str] = "the reducer states no search_space"

    def __init__(
        self, dim: int, head_dim: int, options: BaseOptions | None = None, *, layer: int = 0, depth: int = 1
    ) -> None:
        """Create the reducer of one layer.

        Args:
            dim: Model width.
            head_dim: Width of a head's keys.
            options: The mechanism's options; its defaults if None.
            layer: Number of the layer, from 0.
            depth: Number of layers of the model.
        """
        super().__init__()
        self.dim, self.head_dim, self.layer, self.depth = dim, head_dim, layer, depth
        self.options: Any = options if options is not None else self.Options()
        self.setup()
        if unknown := self.reads - ENTRIES.keys():
            raise UserError(f"reducer {self.name} reads {', '.join(unknown)}: there are only {', '.join(ENTRIES)}")

    # What a mechanism defines ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Create the mechanism's own weights, and set `reads`, `first` and `drops` by its options."""

    @classmethod
    def layers(cls, options: Any, depth: int) -> list[int]:
        """The layers of a model of `depth` layers in which the reducer works."""
        return list(range(depth))

    def remaining(self, grid: Grid) -> int:
        """The number of patches of `grid` that remain."""
        raise NotImplementedError(f"{type(self).__name__} does not define remaining")

    def macs(self, grid: Grid) -> Macs:
        """Multiply-accumulates of the selection or merging for one image on `grid`."""
        return Macs()

    def anneal(self, progress: float) -> None:
        """Remove fewer tokens early in training: `progress` runs from 0 (no token is removed) to 1 (as the options
        say). Evaluation always follows the options. The default ignores it."""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    # What every mechanism inherits -----------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """The mechanism's name and options."""
        return Spec(self.name, self.options)

    def reduced(self, grid: Grid) -> Grid:
        """The reduced grid, for counting costs."""
        left = self.remaining(grid)
        if left == grid.area:
            return grid.whole()
        return grid if left == grid.patches else grid.reduced_to(left)

    def extra_repr(self) -> str:
        return f"{self.spec}, layer={self.layer} of {self.depth}"
