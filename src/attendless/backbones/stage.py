"""One stage of a hierarchical backbone: its entrance, its blocks, and the options of PVT, Swin and Twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal, get_args

from timm.layers import DropPath, Mlp
from timm.models.pvt_v2 import MlpWithDepthwiseConv
from torch import Tensor, nn

from ..attention import (
    Attention,
    Context,
    Grid,
    Macs,
    Spec,
    create,
)
from ..attention.scores import score_shape
from ..errors import UserError, unknown
from .block import Block, ConvBlock, run_block
from .carry import Carry, key_grid
from .carry import Kind as CarryKind
from .cost import Layer, parameters, weight_macs
from .positions import ConvPositions, FourierPositions, LearnedPositions
from .stem import (
    ConvEmbed,
    HalvingEmbed,
    LinePool,
    Merge,
    to_map,
)

Embedding = Literal["patch", "overlap", "halving", "merge", "pool"]
Positions = Literal["fourier", "learned", "conv", "none"]
MlpKind = Literal["plain", "conv", "conv_relu"]


@dataclasses.dataclass(frozen=True)
class Style:
    """The options of a family of hierarchical models; the defaults are those of the fair comparison.

    `embedding`: separate patches, overlapping patches, a stack of convolutions of stride 2, patches merged 2 × 2 after
    the first stage, or pooled along the sequence (HVT). `carry`: how scores are passed to the next stage (`carry.py`).
    `positions`: Fourier features before the first stage, learned in every stage, by convolution in every stage, none.
    `mlp`: plain, or with a depthwise convolution over the grid, or with that and a ReLU before it.
    `class_token`: the last stage has one. `stage_norms`: every stage ends in a norm, not only the last.
    """

    embedding: Embedding = "merge"
    positions: Positions = "fourier"
    mlp: MlpKind = "plain"
    class_token: bool = False
    stage_norms: bool = False
    carry: CarryKind = "none"
    qkv_bias: bool = True
    norm_eps: float = 1e-6
    embed_eps: float = 1e-6
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in (("embedding", Embedding), ("positions", Positions), ("mlp", MlpKind), ("carry", CarryKind)):
            if getattr(self, name) not in get_args(kind):
                raise unknown(name, getattr(self, name), get_args(kind))
        if self.class_token and self.positions != "learned":
            raise UserError(f"a class token needs learned positions, got positions={self.positions!r}")

    @property
    def draws_convolutions(self) -> bool:
        """Whether convolutions have an initialisation of their own, as in PVT v2 and Twins; PVT, Swin and the fair
        comparison use PyTorch's."""
        return self.embedding in ("overlap", "halving") or self.positions == "conv"

    @property
    def norms_maps(self) -> bool:
        """Whether each map is normalised before dense heads, as in Swin. PVT does not, and with `stage_norms` maps are
        already normalised."""
        return not self.stage_norms and self.positions != "learned"

    def embed(self, in_chans: int, dim: int, stride: int) -> ConvEmbed:
        if self.embedding == "halving":
            return HalvingEmbed(in_chans, dim, stride, eps=self.embed_eps)
        overlap, norm = self.embedding == "overlap", self.embedding != "pool"
        return ConvEmbed(in_chans, dim, stride, overlap=overlap, eps=self.embed_eps, norm=norm)

    def downsample(self, in_chans: int, dim: int) -> ConvEmbed | Merge | LinePool:
        if self.embedding == "pool":
            if in_chans != dim:
                raise UserError(f"embedding='pool' needs stages of equal width, got {in_chans} and {dim}")
            return LinePool()
        merge = self.embedding == "merge"
        return Merge(in_chans, dim, eps=self.embed_eps) if merge else self.embed(in_chans, dim, 2)

    def norm(self, dim: int) -> nn.Module:
        return nn.LayerNorm(dim, eps=self.norm_eps)

    def block(self, spec: Spec, grid: Grid, dim: int, num_heads: int, mlp_ratio: float, drop_path: float) -> Block:
        rates = {"attn_drop": self.attn_drop_rate, "proj_drop": self.proj_drop_rate}
        attn = create(spec, dim, num_heads, grid=grid, qkv_bias=self.qkv_bias, **rates)
        make: Any = Mlp if self.mlp == "plain" else partial(MlpWithDepthwiseConv, extra_relu=self.mlp == "conv_relu")
        return (Block if self.mlp == "plain" else ConvBlock)(
            attn,
            self.norm(dim),
            self.norm(dim),
            make(dim, int(dim * mlp_ratio), drop=self.proj_drop_rate),
            drop_path1=DropPath(drop_path),
            drop_path2=DropPath(drop_path),
        )


class Stage(nn.Module):
    """Downsamples the tokens of the stage before, adds positions, and runs the blocks of the stage."""

    blocks: Any

    def __init__(
        self,
        specs: Sequence[Spec],
        before: Grid,
        dims: tuple[int | None, int],
        *,
        num_heads: int,
        mlp_ratio: float,
        drop_paths: Sequence[float],
        style: Style,
        class_token: bool,
        last: Attention | None,
    ) -> None:
        """`dims` holds the width of the stage before (None for the first stage) and of this one; `last` is the last
        attention of the stage before."""
        super().__init__()
        width, dim = dims
        self.grad_checkpointing = False
        self.downsample = style.downsample(width, dim) if width else None
        self.positions: FourierPositions | LearnedPositions | None = None
        if style.positions == "fourier" and width is None:
            self.positions = FourierPositions(dim)
        elif style.positions == "learned":
            self.positions = LearnedPositions(dim, self.grid(before), class_token=class_token)
        grid = self.grid(before)
        self.blocks = nn.ModuleList(
            style.block(spec, grid, dim, num_heads, mlp_ratio, rate)
            for spec, rate in zip(specs, drop_paths, strict=True)
        )
        self.conv_positions = ConvPositions(dim) if style.positions == "conv" else None
        self.norm = style.norm(dim) if style.stage_norms else nn.Identity()
        self.carry: Carry | None = None
        if style.carry != "none" and last is not None:
            self.carry = Carry(style.carry, last, self.blocks[0].attn, self.downsample)

    @property
    def specs(self) -> list[Spec]:
        return [block.attn.spec for block in self.blocks]

    def grid(self, before: Grid) -> Grid:
        """This stage's grid, given that of the stage before."""
        grid = self.downsample.shrunk(before) if self.downsample else before
        return self.positions.place(grid) if self.positions else grid

    def resize(self, grid: Grid) -> None:
        if self.positions is not None:
            self.positions.resize(grid)
        for block in self.blocks:
            block.attn.resize(grid)

    def enter(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        """The tokens of the stage before → this stage's, before its first block."""
        grid = self.grid(context.grid)
        if self.downsample is not None:
            x = self.downsample(to_map(context.grid.restore(x), context.grid))
        if self.positions is not None:
            x = self.positions(x, grid)
        # Context entries belong to the grid of their stage; only losses and carried scores are passed on.
        entered = Context(grid, context.wants, losses=context.losses)
        if self.carry is None or context.scores is None:
            return x, entered
        keys = score_shape(self.blocks[0].attn, 1, grid)[-1]
        scores = self.carry(context.scores, context.grid, grid, keys, self.downsample)
        return x, entered.replace(**{"residual" if self.carry.added else "scores": scores})

    def run_layer(self, number: int, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        """Run one block; before the first, enter the stage; after the last, apply the norm."""
        if number == 0:
            x, context = self.enter(x, context)
        x, context = run_block(self.blocks[number], x, context, checkpointing=self.grad_checkpointing and self.training)
        if number == 0 and self.conv_positions is not None:
            x = self.conv_positions(x, context.grid)
        return (self.norm(x) if number == len(self.blocks) - 1 else x), context

    def costs(self, name: str, grid: Grid, wants: Sequence[Collection[str]], batch: int = 1) -> list[Layer]:
        """The cost of the stage's entrance, with its positions and norm, and of every block, from its `grid` on."""
        parts: list[nn.Module] = [m for m in (self.downsample, self.positions, self.conv_positions) if m is not None]
        macs = Macs(other=sum(weight_macs(part, grid.patches) for part in parts))
        if self.carry is not None:
            keys = key_grid(grid, score_shape(self.blocks[0].attn, 1, grid)[-1])
            macs += Macs(other=self.carry.macs(grid.patches, keys.patches))
            parts.append(self.carry)
        rows = [Layer(f"{name}.entrance", grid, macs, sum(map(parameters, [*parts, self.norm])))]
        for i, block in enumerate(self.blocks):
            rows.append(block.cost(f"{name}.blocks.{i}", grid, wants[i], batch))
            grid = block.grid_after(grid)
        return rows
