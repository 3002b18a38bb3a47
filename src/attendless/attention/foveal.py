"""Foveal attention: sharp where a tile of queries looks, blurred elsewhere. It goes into a pretrained model untrained.

    out_i = softmax over { tokens of the cells chosen for i's tile, prefix tokens, every other cell as one mean key }

The definition, with its two halves `select` and `attend`, is in `attendless.sparse.foveal`; there are no weights beyond
those of full attention. `keep` is the share of cells a tile looks at closely; at 1 this is full attention.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from ..sparse import foveal as definition
from ..sparse import native, ops  # noqa: F401 - `ops` registers torch.ops.attendless
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
        return executor(self.qkv.weight.dtype, self.qkv.weight.device, self.attn_drop.p if self.training else 0.0)


def executor(dtype: torch.dtype, device: torch.device, dropout: float) -> Choice:
    """Who computes it. Both compute the same function, so this is about speed alone."""
    if not native.available:
        why = native.reason
    elif device.type != "cpu":
        why = f"the native kernels run on the CPU, the tensors are on {device.type}"
    elif dtype == torch.float64:
        why = "the native kernels compute in 32-bit floats"
    elif dropout:
        why = "the native kernels do not drop attention weights at random"
    else:
        return Choice("native", "one fused kernel chooses and attends")
    return Choice("torch", f"dense products with a mask: {why}")


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
    if executor(q.dtype, q.device, dropout).path == "native":
        return torch.ops.attendless.foveal(q, k, v, key_bias, places, list(dataclasses.astuple(layout)), scale)[0]
    chosen = definition.select(q, k, layout, scale=scale, key_bias=key_bias, places=places)
    return definition.attend(q, k, v, chosen, layout, scale=scale, key_bias=key_bias, places=places, dropout=dropout)
