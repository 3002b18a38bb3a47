"""Linear maps over the tokens of a grid, such as LaViT's Θ and Ψ: identity + Δ, applied to the last dimension.

    dense       Δ [n, n]                          n² per row: as the LaViT poster prints it
    low_rank    Δ = U V, U [n, r], V [r, n]       2 n r per row
    offset      Δ_ij = w(y_i - y_j, x_i - x_j)    k² per token: a depthwise convolution over the grid; prefix unchanged
    none        Δ = 0: no weights and no cost

Each map starts at Δ = 0. For another grid the identity is unchanged and Δ is resampled as an image along both of its
axes, each row with the same sum; an offset map fits any grid.

Shapes: B batch · H heads · R rows · n tokens · S maps, one for all heads or one for each.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .values import Grid

Kind = Literal["dense", "low_rank", "offset", "none"]


class TokenMap(nn.Module):
    """The identity, and the base of the others: `forward(a [B, H, …, n], grid)` maps the last dimension."""

    def forward(self, a: Tensor, grid: Grid) -> Tensor:
        return a

    def columns(self, a: Tensor, grid: Grid) -> Tensor:
        """The same map applied to the second-last dimension."""
        return self(a.mT, grid).mT

    def macs(self, rows: int, heads: int, grid: Grid) -> int:
        """MACs for `rows` rows in each head."""
        return 0

    def resize(self, grid: Grid) -> None:
        """Resample Δ to `grid` in place."""

    def take(self, delta: Tensor, gram: Tensor, grid: Grid) -> None:
        """Set the weights to the best approximation of Δ [S, n, n] over the tokens of `grid`, for inputs with second
        moments `gram` [S, n, n]."""

    def scale(self, factor: float) -> None:
        """Multiply Δ by a factor."""


class Dense(TokenMap):
    def __init__(self, grid: Grid, maps: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.grid = grid
        self.delta = nn.Parameter(torch.zeros(maps, grid.tokens, grid.tokens, **factory))

    def forward(self, a: Tensor, grid: Grid) -> Tensor:
        delta = self.on(grid)
        return _rows(a, delta + torch.eye(delta.shape[-1], device=delta.device, dtype=delta.dtype))

    def on(self, grid: Grid) -> Tensor:
        if _same(grid, self.grid):
            return self.delta
        return resample(resample(self.delta, self.grid, grid, keep_sum=True).mT, self.grid, grid).mT

    def macs(self, rows: int, heads: int, grid: Grid) -> int:
        return rows * heads * grid.tokens**2

    def resize(self, grid: Grid) -> None:
        self.delta, self.grid = _moved(self.delta, self.on(grid)), grid

    def take(self, delta: Tensor, gram: Tensor, grid: Grid) -> None:
        self.delta.data.copy_(delta)

    def scale(self, factor: float) -> None:
        self.delta.data.mul_(factor)


class LowRank(TokenMap):
    def __init__(self, grid: Grid, maps: int, rank: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.grid = grid
        self.up = nn.Parameter(torch.zeros(maps, grid.tokens, rank, **factory))
        self.down = nn.Parameter(torch.randn(maps, rank, grid.tokens, **factory) * grid.tokens**-0.5)

    def forward(self, a: Tensor, grid: Grid) -> Tensor:
        up, down = self.on(grid)
        return a + _rows(_rows(a, down), up)

    def columns(self, a: Tensor, grid: Grid) -> Tensor:
        if a.ndim > 4:
            return super().columns(a, grid)
        up, down = self.on(grid)  # products from the left need no transposition
        return a + up @ (down @ a)

    def on(self, grid: Grid) -> tuple[Tensor, Tensor]:
        if _same(grid, self.grid):
            return self.up, self.down
        return resample(self.up.mT, self.grid, grid).mT, resample(self.down, self.grid, grid, keep_sum=True)

    def macs(self, rows: int, heads: int, grid: Grid) -> int:
        return 2 * rows * heads * grid.tokens * self.up.shape[-1]

    def resize(self, grid: Grid) -> None:
        up, down = self.on(grid)
        self.up, self.down, self.grid = _moved(self.up, up), _moved(self.down, down), grid

    def take(self, delta: Tensor, gram: Tensor, grid: Grid) -> None:
        """The best Δ of this rank for inputs with these moments: truncated SVD after whitening the inputs."""
        n, rank = gram.shape[-1], min(self.up.shape[-1], gram.shape[-1])
        ridge = 1e-6 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        root = torch.linalg.cholesky(gram + ridge * torch.eye(n, device=gram.device, dtype=gram.dtype))
        u, s, v = torch.linalg.svd(delta @ root)
        down = torch.linalg.solve_triangular(root, v[:, :rank], upper=False, left=False)
        self.up.data.zero_()
        self.up.data[..., :rank] = u[..., :rank] * s[:, None, :rank]
        self.down.data[:, :rank] = down

    def scale(self, factor: float) -> None:
        self.up.data.mul_(factor)


class Offset(TokenMap):
    def __init__(self, maps: int, radius: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(maps, 1, 2 * radius + 1, 2 * radius + 1, **factory))

    def forward(self, a: Tensor, grid: Grid) -> Tensor:
        heads, prefix = a.shape[1], grid.prefix
        flat = a.flatten(2, -2)
        rows = flat.transpose(1, 2).flatten(0, 1)[..., prefix:].unflatten(-1, (grid.height, grid.width))
        weight = self.weight.expand(heads, -1, -1, -1)
        moved = F.conv2d(rows, weight, padding=self.weight.shape[-1] // 2, groups=heads).flatten(-2)
        moved = F.pad(moved, (prefix, 0)).unflatten(0, (a.shape[0], -1)).transpose(1, 2)
        return a + moved.reshape(a.shape)

    def macs(self, rows: int, heads: int, grid: Grid) -> int:
        return rows * heads * grid.patches * self.weight[0].numel()

    def take(self, delta: Tensor, gram: Tensor, grid: Grid) -> None:
        """The mean of Δ over the pairs of patches at each offset."""
        side, maps = self.weight.shape[-1], len(self.weight)
        patches = delta[:, grid.prefix :, grid.prefix :].reshape(maps, *2 * (grid.height, grid.width))
        self.weight.data.zero_()
        for y, x in ((y, x) for y in range(side) for x in range(side)):
            dy, dx = y - side // 2, x - side // 2
            pairs = patches.diagonal(dy, 1, 3).diagonal(dx, 1, 2)
            if pairs.numel():
                self.weight.data[:, 0, y, x] = pairs.mean((-2, -1))

    def scale(self, factor: float) -> None:
        self.weight.data.mul_(factor)


def create_map(kind: Kind, grid: Grid, maps: int, rank: int, radius: int, factory: dict[str, Any]) -> TokenMap:
    """A map over the tokens of `grid` that starts as the identity."""
    if kind == "dense":
        return Dense(grid, maps, factory)
    if kind == "low_rank":
        return LowRank(grid, maps, min(rank, grid.tokens), factory)
    return Offset(maps, radius, factory) if kind == "offset" else TokenMap()


def _rows(a: Tensor, weight: Tensor) -> Tensor:
    """Rows of a [B, H, …, n] times weight [S, m, n] transposed → [B, H, …, m]."""
    if len(weight) == 1:
        return a @ weight[0].mT
    return (a.flatten(2, -2) @ weight.mT).unflatten(2, a.shape[2:-1])


def _same(a: Grid, b: Grid) -> bool:
    return (a.height, a.width, a.prefix) == (b.height, b.width, b.prefix)


def resample(weight: Tensor, old: Grid, new: Grid, *, keep_sum: bool = False) -> Tensor:
    """weight [S, m, old tokens] → [S, m, new tokens]; prefix columns are unchanged."""
    image = weight[..., old.prefix :].unflatten(-1, (old.height, old.width))
    image = F.interpolate(image, (new.height, new.width), mode="bicubic", antialias=True)
    scale = old.patches / new.patches if keep_sum else 1.0
    return torch.cat([weight[..., : old.prefix], image.flatten(-2) * scale], dim=-1)


def _moved(old: nn.Parameter, new: Tensor) -> nn.Parameter:
    return nn.Parameter(new.detach().clone(), requires_grad=old.requires_grad)
