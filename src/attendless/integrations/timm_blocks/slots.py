"""timm's Swin, PVT v2 and XCiT: attentions that need nothing from other layers, put into timm's own model.

Their blocks do not pass a context, so each exchanged block makes its own from the grid it is called with, and attends
over the whole grid of its stage as the attention put there sees fit. `window+window:shift=3`, `reduced:ratio=8/…` and
`xca` are what these models had and compute the same as before; with other attentions, weights that find no place
(relative position biases, reductions, temperatures) are dropped and the model wants training. The report says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from timm.models.pvt_v2 import Attention as PvtAttention
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from ...attention import (
    Attention,
    Context,
    Grid,
    Macs,
    Spec,
    create,
    parse,
)
from ...attention.fitting import fitted
from ...backbones.block import frozen_alike, take_weights
from ...backbones.cost import weight_macs
from ...errors import UserError
from ...sizes import input_size

NAMES = ("timm's Swin", "PVT v2", "XCiT")


class TimmBlock(nn.Module):
    """A block of timm's with our attention in it: every other part, under its name, is timm's."""

    attn: Any
    norm1: Any
    norm2: Any
    norm3: Any
    mlp: Any
    local_mp: Any
    drop_path1: Any
    drop_path2: Any
    drop_path3: Any
    gamma1: Any
    gamma2: Any
    gamma3: Any

    def __init__(self, block: Any, attn: Attention) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, attn if name == "attn" else child)
        for name, value in block.named_parameters(recurse=False):
            self.register_parameter(name, value)
        if hasattr(block, "drop_path"):  # timm before 1.0.21: one in XCiT's block for all its branches
            self.drop_path1 = self.drop_path2 = self.drop_path3 = block.drop_path

    def attend(self, x: Tensor, grid: Grid, scale: Tensor | float = 1.0) -> Tensor:
        """x [B, N, C] → x + attention of its norm."""
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


@dataclasses.dataclass(frozen=True)
class Family:
    """Where a kind of model keeps its blocks, on which grids, what its attention costs, and the block that replaces."""

    blocks: Callable[[Any, tuple[int, int]], list[tuple[str, Grid]]]
    macs: Callable[[Any, Grid], Macs]
    block: type[TimmBlock]


def swin_macs(block: Any, grid: Grid) -> Macs:
    """Attention in windows, the grid padded to whole ones."""
    (h, w), attn = block.window_size, block.attn
    windows, width = ceil(grid.height / h) * ceil(grid.width / w), attn.qkv.out_features // 3
    return Macs(core=2 * windows * (h * w) ** 2 * width, projections=windows * h * w * 4 * block.dim * width)


def pvt_macs(block: Any, grid: Grid) -> Macs:
    """Every query against keys on a reduced grid."""
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
    """Every channel of a head against every other."""
    N, C = grid.tokens, block.attn.qkv.in_features
    return Macs(core=2 * N * C * C // block.attn.num_heads, projections=4 * N * C * C)


def _swin_blocks(model: Any, size: tuple[int, int]) -> list[tuple[str, Grid]]:
    height, width = model.patch_embed.grid_size
    found = []
    for i, stage in enumerate(model.layers):
        # Patch merging pads odd sizes.
        height, width = (height, width) if i == 0 else (ceil(height / 2), ceil(width / 2))
        found += [(f"layers.{i}.blocks.{j}", Grid(height, width)) for j in range(len(stage.blocks))]
    return found


def _pvt_blocks(model: Any, size: tuple[int, int]) -> list[tuple[str, Grid]]:
    found, (height, width) = [], (ceil(size[0] / 4), ceil(size[1] / 4))
    for i, stage in enumerate(model.stages):
        height, width = (height, width) if i == 0 else (ceil(height / 2), ceil(width / 2))
        found += [(f"stages.{i}.blocks.{j}", Grid(height, width)) for j in range(len(stage.blocks))]
    return found


def _xcit_blocks(model: Any, size: tuple[int, int]) -> list[tuple[str, Grid]]:
    patch = model.patch_embed.patch_size
    return [(f"blocks.{i}", Grid(ceil(size[0] / patch), ceil(size[1] / patch))) for i in range(len(model.blocks))]


FAMILIES: dict[type, Family] = {
    SwinTransformer: Family(_swin_blocks, swin_macs, SwinBlock),
    PyramidVisionTransformerV2: Family(_pvt_blocks, pvt_macs, PvtBlock),
    Xcit: Family(_xcit_blocks, xcit_macs, XcitBlock),
}


def supports(model: nn.Module) -> bool:
    return type(model) in FAMILIES


def slots(model: nn.Module) -> list[FamilySlot]:
    """Every layer of a model of these families whose attention can be exchanged."""
    family = FAMILIES[type(model)]
    return [_slot(model, family, name, grid) for name, grid in family.blocks(model, input_size(model))]


@dataclasses.dataclass
class FamilySlot:
    name: str
    grid: Grid
    now: Macs
    others: Macs
    model: nn.Module
    family: Family

    @property
    def block(self) -> Any:
        return self.model.get_submodule(self.name)

    @property
    def attn(self) -> nn.Module:
        return self.block.attn

    @property
    def spec(self) -> Spec | None:
        return self.attn.spec if isinstance(self.attn, Attention) else None

    def weights(self) -> dict[str, Tensor]:
        found = dict(self.attn.state_dict(keep_vars=True))
        if isinstance(self.attn, PvtAttention):
            # `norm` is the contract's name for a norm of the output; this one is of the reduced keys.
            found |= {f"sr_{name}": found.pop(name) for name in list(found) if name.startswith("norm.")}
            for end in ("weight", "bias"):
                if f"q.{end}" in found:
                    found[f"qkv.{end}"] = torch.cat([found.pop(f"q.{end}"), found.pop(f"kv.{end}")])
        return found

    stays = ""

    def standing(self) -> Callable[[], None]:
        parent, _, index = self.name.rpartition(".")
        block, attn = self.block, self.attn

        def back() -> None:
            block.attn = attn
            self.model.get_submodule(parent)[int(index)] = block  # type: ignore[operator]

        return back

    def fallback(self) -> Attention | None:
        return None if self.spec is None else self.make(parse("full"))

    def rival(self, grid: Grid) -> Macs | None:
        """The model's own attention, while it stands here: it is not full."""
        return _cost(self.block, grid, self.family) if self.spec is None else None

    def cost(self, attention: Attention) -> Macs:
        return attention.macs(self.grid)

    def fate(self, ours: Attention) -> tuple[set[str], set[str], set[str]]:
        return fate(self.weights(), ours)

    def make(self, spec: Spec) -> Attention:
        attn: Any = self.attn
        weights = self.weights()
        qkv = weights["qkv.weight"]
        ours = create(
            spec,
            qkv.shape[1],
            attn.num_heads,
            grid=self.grid,
            head_dim=qkv.shape[0] // 3 // attn.num_heads,
            qkv_bias="qkv.bias" in weights,
            attn_drop=attn.attn_drop.p,
            proj_drop=attn.proj_drop.p,
            device=qkv.device,
            dtype=qkv.dtype,
        )
        if ours.reads:
            raise UserError(
                f"attention {spec} cannot stand in {self.name}: timm's {type(self.model).__name__} does not pass on "
                f"the {', '.join(sorted(ours.reads))} it reads"
            )
        take_weights(ours, weights)
        return frozen_alike(ours.train(attn.training), attn)

    def put(self, attention: Attention) -> None:
        parent, _, index = self.name.rpartition(".")
        block = self.block
        if isinstance(block, TimmBlock):
            block.attn = attention
        else:
            self.model.get_submodule(parent)[int(index)] = self.family.block(block, attention)  # type: ignore[operator]


def fate(weights: dict[str, Tensor], ours: Attention) -> tuple[set[str], set[str], set[str]]:
    """Of the weights that stand somewhere and those of an attention in their place: copied, new, dropped."""
    weights = fitted(ours, weights)
    kept = {name for name, value in ours.state_dict().items() if name in weights and weights[name].shape == value.shape}
    new = {name for name, _ in ours.named_parameters()} - kept
    return kept, new, {name for name, value in weights.items() if isinstance(value, nn.Parameter) and name not in kept}


def _slot(model: nn.Module, family: Family, name: str, grid: Grid) -> FamilySlot:
    block: Any = model.get_submodule(name)
    now = _cost(block, grid, family)
    convolution = getattr(block, "local_mp", None)
    other = weight_macs(convolution, grid.tokens) if convolution is not None else 0
    return FamilySlot(name, grid, now, Macs(mlp=weight_macs(block.mlp, grid.tokens), other=other), model, family)


def _cost(block: Any, grid: Grid, family: Family) -> Macs:
    return block.attn.macs(grid) if isinstance(block.attn, Attention) else family.macs(block, grid)
