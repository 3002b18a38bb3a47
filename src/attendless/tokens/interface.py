"""The contract a token reducer keeps. Most stand in a block between attention and MLP:

    x + attention → reducer → MLP: from here on fewer tokens are computed with

or, with `first`, before the attention. A reducer leaves prefix tokens alone, returns the tokens that remain and a
context whose grid says, per image, which cell each came from (`cells`), how many tokens it stands for (`sizes`) and
which token stands for each cell (`owners`), so that `Grid.restore` can put the result back on the whole grid. How many
tokens remain follows from the grid alone: shapes are static, costs can be counted beforehand, and a compiler sees no
surprise.

One spec (`tome:r=8`) speaks for a whole model: the class says in which of its layers it stands, and the module in each
of them knows its layer's number.
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
    """`forward(x_BNC, context) -> (x_BnC, context)`, the context on the grid that is left.

    A mechanism states its `name` and `Options`, and writes `layers`, `remaining` and `forward`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    #: Context entries that the attention of the same block must leave, such as `class_attention`.
    reads: frozenset[str] = frozenset()
    #: Whether it stands before the block's attention rather than between attention and MLP.
    first: bool = False
    #: Whether tokens go without any other taking over what they stood for.
    drops: bool = False
    #: Specs worth trying: tests run each of them, and `attendless list` shows them.
    examples: ClassVar[tuple[str, ...]] = ()
    #: How `tune` varies the reducer; None: `tune` takes the reducer as given, for the reason in `not_searched`.
    search_space: ClassVar[SearchSpace | None] = None
    not_searched: ClassVar[str] = "the reducer states no search_space"

    def __init__(
        self, dim: int, head_dim: int, options: BaseOptions | None = None, *, layer: int = 0, depth: int = 1
    ) -> None:
        """`dim` is the model's width, `head_dim` that of a head's keys; this is layer number `layer` of `depth`."""
        super().__init__()
        self.dim, self.head_dim, self.layer, self.depth = dim, head_dim, layer, depth
        self.options: Any = options if options is not None else self.Options()
        self.setup()
        if unknown := self.reads - ENTRIES.keys():
            raise UserError(f"reducer {self.name} reads {', '.join(unknown)}: there are only {', '.join(ENTRIES)}")

    # What a mechanism writes -------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Make weights of the mechanism's own, and settle what it reads by its options."""

    @classmethod
    def layers(cls, options: Any, depth: int) -> list[int]:
        """The layers of a model of `depth` in which it stands."""
        return list(range(depth))

    def remaining(self, grid: Grid) -> int:
        """How many patches of `grid` are left."""
        raise NotImplementedError(f"{type(self).__name__} does not define remaining")

    def macs(self, grid: Grid) -> Macs:
        """What choosing or merging costs for one image on `grid`."""
        return Macs()

    def anneal(self, progress: float) -> None:
        """Take away less while a training has only begun: `progress` runs from 0, nothing goes, to 1, all that the
        options say. In evaluation it is always as they say. Most do nothing of the kind."""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    # What every mechanism gets -----------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.options)

    def reduced(self, grid: Grid) -> Grid:
        """The grid that is left of `grid`, for counting."""
        left = self.remaining(grid)
        if left == grid.area:
            return grid.whole()
        return grid if left == grid.patches else grid.reduced_to(left)

    def extra_repr(self) -> str:
        return f"{self.spec}, layer={self.layer} of {self.depth}"
