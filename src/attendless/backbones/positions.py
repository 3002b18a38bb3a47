"""Position embeddings of a stage: added before its blocks, or a convolution after its first block."""

from __future__ import annotations

import dataclasses

import torch
from timm.layers import trunc_normal_
from timm.models.xcit import PositionalEncodingFourier
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Grid
from .stem import to_map, to_tokens


class FourierPositions(nn.Module):
    """XCiT's: sines and cosines of both coordinates, through a linear layer. Fits any grid."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.encoding = PositionalEncodingFourier(hidden_dim=32, dim=dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return x + to_tokens(self.encoding(1, grid.height, grid.width))

    def place(self, grid: Grid) -> Grid:
        return grid

    def resize(self, grid: Grid) -> None:
        """No weights depend on the grid."""


class LearnedPositions(nn.Module):
    """PVT's: one vector per cell, interpolated bilinearly on other grids; with `class_token`, also that token and its
    vector."""

    def __init__(self, dim: int, grid: Grid, *, class_token: bool = False) -> None:
        super().__init__()
        self.prefix = int(class_token)
        self.made_for = grid
        self.cls_token = nn.Parameter(trunc_normal_(torch.empty(1, 1, dim), std=0.02)) if class_token else None
        self.pos_embed = nn.Parameter(trunc_normal_(torch.empty(1, self.prefix + grid.patches, dim), std=0.02))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.on(grid)

    def place(self, grid: Grid) -> Grid:
        """The grid with the class token in front, if there is one."""
        return dataclasses.replace(grid, prefix=self.prefix)

    def on(self, grid: Grid) -> Tensor:
        """The positions resampled on `grid`."""
        new, old = [grid.height, grid.width], [self.made_for.height, self.made_for.width]
        if new == old:
            return self.pos_embed
        cells = self.pos_embed[:, self.prefix :].mT.unflatten(2, old)
        cells = F.interpolate(cells, new, mode="bilinear", align_corners=False).flatten(2).mT
        return torch.cat([self.pos_embed[:, : self.prefix], cells], dim=1)

    def resize(self, grid: Grid) -> None:
        self._replace(self.on(grid))
        self.made_for = grid

    def drop_class_token(self) -> None:
        self._replace(self.pos_embed[:, self.prefix :])
        self.prefix, self.cls_token = 0, None

    def _replace(self, positions: Tensor) -> None:
        self.pos_embed = nn.Parameter(positions.detach().clone(), requires_grad=self.pos_embed.requires_grad)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters()}


class ConvPositions(nn.Module):
    """Twins': x plus a depthwise 3 × 3 convolution of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return x + to_tokens(self.conv(to_map(x, grid)))

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters()}
