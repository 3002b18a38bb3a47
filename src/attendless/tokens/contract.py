"""The contract a token reducer keeps. It stands in a block between attention and MLP.

    x + attention → reducer → MLP: from here on fewer tokens are computed with

A reducer leaves prefix tokens alone, returns the tokens that remain and a context whose grid says, per image, which
cell each came from (`cells`), how many tokens it stands for (`sizes`) and which token stands for each cell (`owners`),
so that `Grid.restore` can put the result back on the whole grid. How many tokens remain follows from the grid alone:
shapes are static, costs can be counted beforehand, and a compiler sees no surprise.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ..attention import Context, Grid, Macs


class Reducer(nn.Module):
    """`forward(x_BNC, context) -> (x_BnC, context)`, the context on the grid that is left."""

    name: ClassVar[str]
    #: Context entries that the attention of the same block must leave, such as `class_attention`.
    reads: ClassVar[frozenset[str]] = frozenset()

    def reduced(self, grid: Grid) -> Grid:
        """The grid that is left of `grid`, for counting: `Grid.reduced_to(patches)`."""
        raise NotImplementedError(f"{type(self).__name__} does not define reduced")

    def macs(self, grid: Grid) -> Macs:
        """What choosing or merging costs for one image on `grid`."""
        return Macs()

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        raise NotImplementedError(f"{type(self).__name__} does not define forward")
