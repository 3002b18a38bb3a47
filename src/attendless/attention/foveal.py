"""Foveal attention: exact keys where a tile of queries attends most, means elsewhere. Requires no training.

    out_i = softmax over { tokens of the cells chosen for i's tile, prefix tokens, every other cell as one mean key }
          + mass on blurred cells · scale · q_i H        H: how values vary with keys inside cells, on average

The definition, with its two halves `select` and `attend`, is in `attendless.sparse.foveal`; there are no weights beyond
those of full attention. `keep` is the share of cells whose tokens a tile attends to exactly; at 1 this is full
attention. Frames of a video lie on one canvas (`sparse.canvas`), on which cells and tiles of side 4 or more are boxes
in space and time.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from .. import options
from ..sparse import canvas, dispatch, operations
from ..sparse import foveal as definition
from ..sparse.backend import Case
from .interface import Attention
from .registry import register
from .values import Context, Grid


@dataclasses.dataclass(frozen=True)
class Options(options.Options):
    keep: float = options.option(
        0.25, "share of the key cells that each tile of queries attends to exactly", low=0, high=1
    )
    cell: int | Literal["auto"] = options.option("auto", "side of a square cell of keys, in patches", low=1)
    tile: int | Literal["auto"] = options.option(
        "auto", "side of a square tile of queries that share their choice of cells", low=1
    )
    coarse: int | Literal["auto"] = options.option(
        "auto", "side of the larger cells far from every chosen cell; 0 for none", low=0
    )
    order: int = options.option(
        1,
        "1: add a first-order correction for how values vary with keys inside blurred cells; 0: means alone",
        low=0,
        high=1,
    )
    int8: bool = options.option(
        False, "compute scores from int8 queries and keys, values in bf16; for inference, fastest on CPUs with VNNI"
    )


#: Above this rotation of keys from patch to patch, `coarse=auto` uses no coarse cells: their means would cancel out.
MOST_TURN = 0.5


@register
class Foveal(Attention):
    name = "foveal"
    frames = True
    Options = Options
    examples = ("foveal", "foveal:keep=0.1,tile=1", "foveal:keep=0.2,cell=2,tile=3,coarse=4", "foveal:keep=1")
    provides = frozenset({"class_attention", "keys"})
    executes_more = "plain PyTorch masks dense products"

    def layout(self, grid: Grid) -> definition.Layout:
        dispatch.refuse_tracing(self.name)  # while tracing, the sides of a grid are symbols, not numbers
        options, (height, width) = self.options, canvas.sides(grid.depth, grid.height, grid.width)
        if self.turn > MOST_TURN and options.coarse == "auto":
            options = dataclasses.replace(options, coarse=0)
        if torch.compiler.is_compiling():  # Dynamo does not trace cached functions
            return definition.layout(height, width, grid.prefix, **dataclasses.asdict(options))
        return _layout(height, width, grid.prefix, options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, bias = context.grid, context.grid.key_bias(q.dtype)
        places = _places(grid, q)
        out = operations.foveal(
            q, k, v, self.layout(grid), scale=self.scale, key_bias=bias, places=places, dropout=self.dropout
        )
        return out, context

    def sees(self, x: Tensor, context: Context, query: int) -> Tensor:
        """The tokens of the cells that the query's tile chose; all others are averaged."""
        grid, layout = context.grid, self.layout(context.grid)
        if query < grid.prefix:
            return super().sees(x, context, query)
        q, k, _ = self.project(x)
        places = _places(grid, q)
        chosen = definition.select(q, k, layout, scale=self.scale, key_bias=grid.key_bias(q.dtype), places=places)
        cell = definition.block_of(layout, layout.cell, places).expand(len(x), -1)
        tile = definition.block_of(layout, layout.tile, places).expand(len(x), -1)[:, query - grid.prefix]
        sharp = chosen[torch.arange(len(x)), :, tile][..., None] == cell[:, None, None]
        return torch.nn.functional.pad(sharp.any(2), (grid.prefix, 0), value=True)

    def core_macs(self, grid: Grid) -> int:
        return definition.macs(self.layout(grid), self.attn_dim, self.head_dim, patches=grid.patches)

    def refuses(self, grid: Grid) -> str | None:
        self.layout(grid)  # raises if the sizes do not fit each other
        return "it does not take reduced sets of several frames" if grid.reduced and grid.depth > 1 else None

    def case(self, grid: Grid, batch: int = 1) -> Case:
        return self.case_of("foveal", self.layout(grid), batch)


def _places(grid: Grid, q: Tensor) -> Tensor | None:
    """The canvas position of each patch [B, n]; None where the patches fill the canvas row by row."""
    if grid.depth == 1:
        return grid.cells
    return canvas.places(grid.depth, grid.height, grid.width, q.device).expand(q.shape[0], -1)


@lru_cache(maxsize=1024)
def _layout(height: int, width: int, prefix: int, options: Options) -> definition.Layout:
    return definition.layout(height, width, prefix, **dataclasses.asdict(options))
