"""Foveal attention: sharp where a tile of queries looks, blurred elsewhere. It goes into a pretrained model untrained.

    out_i = softmax over { tokens of the cells chosen for i's tile, prefix tokens, every other cell as one mean key }

The definition, with its two halves `select` and `attend`, is in `attendless.sparse.foveal`; there are no weights beyond
those of full attention. `keep` is the share of cells a tile looks at closely; at 1 this is full attention.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..sparse import flex, ops  # noqa: F401 - `ops` registers torch.ops.attendless
from ..sparse import foveal as definition
from ..sparse.choose import Ways, against_full, choose, native_refuses
from ..sparse.costs import foveal_executed
from . import spec
from .contract import Attention, Choice, Context, Grid
from .registry import register


@dataclasses.dataclass(frozen=True)
class Options(spec.Options):
    keep: float = spec.option(0.25, "share of the key cells each tile of queries looks at closely", low=0, high=1)
    cell: int | Literal["auto"] = spec.option("auto", "side of a square cell of keys, in patches", low=1)
    tile: int | Literal["auto"] = spec.option("auto", "side of a square tile of queries that choose together", low=1)
    coarse: int | Literal["auto"] = spec.option(
        "auto", "side of the larger cells far from any choice; 0 for none", low=0
    )


@register
class Foveal(Attention):
    name = "foveal"
    Options = Options
    examples = ("foveal", "foveal:keep=0.1,tile=1", "foveal:keep=0.2,cell=2,tile=3,coarse=4", "foveal:keep=1")
    executes_more = "plain PyTorch masks dense products"

    def layout(self, grid: Grid) -> definition.Layout:
        return definition.layout(grid.height, grid.width, grid.prefix, **dataclasses.asdict(self.options))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, bias = context.grid, context.grid.key_bias(q.dtype)
        if "class_attention" in context.wants:
            # The class token sees every token exactly, so its row is the full one.
            row = self.scale * q[:, :, :1] @ k.transpose(-2, -1)
            row = row if bias is None else row + bias[:, None, None]
            context = context.replace(class_attention=torch.softmax(row, dim=-1)[:, :, 0])
        dropout = self.attn_drop.p if self.training else 0.0
        return foveal(
            q, k, v, self.layout(grid), scale=self.scale, key_bias=bias, places=grid.cells, dropout=dropout
        ), context

    def core_macs(self, grid: Grid) -> int:
        return definition.macs(self.layout(grid), self.attn_dim, patches=grid.patches)

    def refuses(self, grid: Grid) -> str | None:
        self.layout(grid)  # sizes that do not fit each other are an error whatever the grid
        return None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return choose(self._ways(grid, batch))

    def estimate(self, grid: Grid, batch: int = 1) -> tuple[float, float] | None:
        return against_full(self._ways(grid, batch), 2 * batch * grid.tokens**2 * self.attn_dim)

    def _ways(self, grid: Grid, batch: int) -> Ways:
        weight, dropout = self.qkv.weight, self.attn_drop.p if self.training else 0.0
        return ways(self.layout(grid), batch, self.num_heads, self.head_dim, weight.dtype, weight.device.type, dropout)


@lru_cache(maxsize=1024)
def ways(
    layout: definition.Layout,
    batch: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    dropout: float,
) -> Ways:
    """What can compute it: all the same function, so this is about speed alone."""
    dim = batch * heads * width
    dense = ("torch", foveal_executed(layout, dim))
    macs = definition.macs(layout, dim)
    why = native_refuses(dtype, device, dropout)
    if not why:
        return Ways("foveal", (("native", macs), dense), layout.tile**2, device)
    if device == "cuda":
        why = flex.refuses(dtype, width, dropout)
    if not why:
        return Ways("foveal", (("flex", macs), dense), layout.tile**2, device, "FlexAttention skips what is not seen")
    return Ways("foveal", (dense,), layout.tile**2, device, f"dense products with a mask: {why}")


# A compiler takes the answer for a constant of the graph, so the arguments are plain numbers and names.
@torch.compiler.assume_constant_result
def executor(
    sizes: tuple[int, ...], batch: int, heads: int, width: int, dtype: torch.dtype, device: str, dropout: float
) -> str:
    """The path that computes it."""
    return choose(ways(definition.Layout(*sizes), batch, heads, width, dtype, device, dropout)).path


def foveal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: definition.Layout,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    places: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Choose and attend: q, k [B, H, N, D], v [B, H, N, ·] → [B, H, N, ·]."""
    sizes = dataclasses.astuple(layout)
    batch = 1 if torch.compiler.is_compiling() else len(q)  # there it may be a symbol, and one graph serves all
    path = executor(sizes, batch, q.shape[1], q.shape[3], q.dtype, q.device.type, dropout)
    if path == "native":
        inputs = (q, k, v, key_bias, places, list(sizes), scale)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:4]):
            return torch.ops.attendless.foveal(*inputs)[0]
        return torch.ops.attendless.foveal_forward(*inputs)
    chosen = definition.select(q, k, layout, scale=scale, key_bias=key_bias, places=places)
    if path == "flex":
        return flex.attend(q, k, v, chosen, layout, scale=scale, key_bias=key_bias, places=places)
    return definition.attend(q, k, v, chosen, layout, scale=scale, key_bias=key_bias, places=places, dropout=dropout)
