"""Blocks of timm's Swin, PVT v2 and XCiT with an attendless attention, and the cost of the attention that they replace.

These blocks receive no context. Each exchanged block makes one from the grid it is called with, and its attention sees
the whole grid of the stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING, Any

from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from ...attention import Attention, Context, Grid, Macs
from ...sizes import Size


class TimmBlock(nn.Module):
    """A block of timm's with an attendless attention; every other part is timm's, under its name."""

    def __init__(self, block: Any, attn: Attention) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, attn if name == "attn" else child)
        for name, value in block.named_parameters(recurse=False):
            self.register_parameter(name, value)
        if hasattr(block, "drop_path"):  # timm before 1.0.21: one for all branches of XCiT's block
            self.drop_path1 = self.drop_path2 = self.drop_path3 = block.drop_path

    if TYPE_CHECKING:  # submodules have the names of timm's block

        def __getattr__(self, name: str) -> Any: ...

    def attend(self, x: Tensor, grid: Grid, scale: Tensor | float = 1.0) -> Tensor:
        """x [B, N, C] → x + scale · attention(norm x)."""
        context = Context(grid)
        out, context = self.attn(self.norm1(x), context)
        return self.attn.refine(x + self.drop_path1(scale * out), context)


class SwinBlock(TimmBlock):
    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        x = self.attend(x.reshape(B, H * W, C), Grid(H, W))
        return (x + self.drop_path2(self.mlp(self.norm2(x)))).reshape(B, H, W, C)

    def set_input_size(self, feat_size: tuple[int, int], window_size: Any = None, always_partition: Any = None) -> None:
        self.attn.resize(Grid(*feat_size))


class PvtBlock(TimmBlock):
    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = self.attend(x, Grid(*feat_size))
        return x + self.drop_path2(self.mlp(self.norm2(x), feat_size))


class XcitBlock(TimmBlock):
    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        x = self.attend(x, Grid(H, W), self.gamma1)
        x = x + self.drop_path3(self.gamma3 * self.local_mp(self.norm3(x), H, W))
        return x + self.drop_path2(self.gamma2 * self.mlp(self.norm2(x)))


def swin_macs(block: Any, grid: Grid) -> Macs:
    """Attention in windows; the grid is padded to whole windows."""
    (h, w), attn = block.window_size, block.attn
    windows, width = ceil(grid.height / h) * ceil(grid.width / w), attn.qkv.out_features // 3
    return Macs(core=2 * windows * (h * w) ** 2 * width, projections=windows * h * w * 4 * block.dim * width)


def pvt_macs(block: Any, grid: Grid) -> Macs:
    """Every query with the keys of a reduced grid."""
    attn, N, C = block.attn, grid.tokens, block.attn.dim
    if attn.pool is not None:
        M, reduce = 49, 49 * C * C
    elif attn.sr is not None:
        r = attn.sr.stride[0]
        M = (grid.height // r) * (grid.width // r)
        reduce = M * attn.sr.weight.numel()
    else:
        M, reduce = N, 0
    return Macs(core=2 * N * M * C, projections=2 * N * C * C + 2 * M * C * C, other=reduce)


def xcit_macs(block: Any, grid: Grid) -> Macs:
    """Every channel of a head with every other."""
    N, C = grid.tokens, block.attn.qkv.in_features
    return Macs(core=2 * N * C * C // block.attn.num_heads, projections=4 * N * C * C)


def _swin_layers(model: Any, size: Size) -> list[tuple[str, Grid]]:
    return _halving("layers", model.layers, *model.patch_embed.grid_size)


def _pvt_layers(model: Any, size: Size) -> list[tuple[str, Grid]]:
    return _halving("stages", model.stages, ceil(size[0] / 4), ceil(size[1] / 4))


def _halving(name: str, stages: Any, height: int, width: int) -> list[tuple[str, Grid]]:
    """Each stage after the first halves the grid; odd sides are padded."""
    found = []
    for i, stage in enumerate(stages):
        height, width = (height, width) if i == 0 else (ceil(height / 2), ceil(width / 2))
        found += [(f"{name}.{i}.blocks.{j}", Grid(height, width)) for j in range(len(stage.blocks))]
    return found


def _xcit_layers(model: Any, size: Size) -> list[tuple[str, Grid]]:
    patch = model.patch_embed.patch_size
    return [(f"blocks.{i}", Grid(ceil(size[0] / patch), ceil(size[1] / patch))) for i in range(len(model.blocks))]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The paths and grids of a model's blocks, the cost of their own attention, and the block that replaces them."""

    layers: Callable[[Any, Size], list[tuple[str, Grid]]]
    macs: Callable[[Any, Grid], Macs]
    block: type[TimmBlock]


KINDS: dict[type, Kind] = {
    SwinTransformer: Kind(_swin_layers, swin_macs, SwinBlock),
    PyramidVisionTransformerV2: Kind(_pvt_layers, pvt_macs, PvtBlock),
    Xcit: Kind(_xcit_layers, xcit_macs, XcitBlock),
}
