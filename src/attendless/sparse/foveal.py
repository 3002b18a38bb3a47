"""Foveal attention: sharp where a tile of queries looks, blurred everywhere else, one softmax over both.

The patches of the grid are grouped twice: into c × c *cells* of keys and t × t *tiles* of queries. Cells and tiles at
the edge of the grid may be partial. With w the number of tokens a key represents (1, unless tokens were merged), a
cell has

    k̄ = Σ w k / Σ w        v̄ = Σ w v / Σ w        n = Σ w

    select   each tile takes the `budget` cells with the highest scale · q̄·k̄, q̄ the mean of its queries. The cells
             that the tile overlaps always come first. The mean of linear scores is the score of the mean query, so
             the selection costs tiles × cells dot products.
    attend   each patch query: one softmax over every prefix token, the tokens of the chosen cells, and each other
             cell as one key k̄ with score + log n and value v̄. Prefix queries attend to every token.

With `coarse` there is a second blur level: a coarse cell that contains no chosen cell is one key; inside the other
coarse cells, each cell that was not chosen is one key. No probability mass is dropped. With every cell chosen, the
result is full attention. `visibility` states this rule, `levels` computes the means.

Keys and values vary together inside a cell, and a mean key with a mean value loses this covariance. With `order` 1 a
first-order correction restores its average over the grid:

    H = Σ w (k − k̄)(v − v̄)ᵀ / Σ w        out_i ← out_i + m_i · scale · q_i H

m_i is the probability mass that query i gives to blurred cells; k̄ and v̄ are the means of a token's cell. Each blur
level has its own H and mass.

Shapes: B batch · H heads · N tokens · n patches · D head width · T tiles · M cells chosen.
This file is the differentiable PyTorch definition. It computes and masks all N × N products: use it as the reference
in tests, not for speed. Index tables are NumPy arrays, which `torch.export` stores as constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from . import fused

Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The cells and tiles of a grid, the number of cells each tile sees sharply (`budget`), whether the first-order
    correction is applied (`order`), and whether scores are products of int8 (`int8`; see `bf16`)."""

    height: int
    width: int
    prefix: int
    cell: int
    tile: int
    coarse: int
    budget: int
    order: int = 0
    int8: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The integers that the kernels take. (`dataclasses.astuple` would deep-copy each one at every call.)"""
        grid = (self.height, self.width, self.prefix, self.cell, self.tile, self.coarse, self.budget, self.order)
        return (*grid, self.int8) if self.int8 else grid

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """Side and number of the cells of each blur level, the finer level first."""
        fine, coarse = (self.cell, self.cells), (self.coarse, self.coarse_cells)
        return (fine, coarse) if self.coarse else (fine,)

    @property
    def patches(self) -> int:
        return self.height * self.width

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    @property
    def cells(self) -> int:
        return _blocks(self.height, self.cell) * _blocks(self.width, self.cell)

    @property
    def tiles(self) -> int:
        return _blocks(self.height, self.tile) * _blocks(self.width, self.tile)

    @property
    def coarse_cells(self) -> int:
        return _blocks(self.height, self.coarse) * _blocks(self.width, self.coarse) if self.coarse else 0


def layout(
    height: int,
    width: int,
    prefix: int = 0,
    *,
    keep: float,
    cell: int | Auto = "auto",
    tile: int | Auto = "auto",
    coarse: int | Auto = "auto",
    order: int = 1,
    int8: bool = False,
) -> Layout:
    """The layout in which each tile sees a share `keep` of the cells sharply, including those that it overlaps.

    `auto` follows measurements on a pretrained model (docs/results/foveal.md). On a small grid, a tile of sixteen
    queries would spend its budget on the cells it overlaps, so each query is a tile of its own. On a large grid, the
    means of 2 × 2 cells cost more than the sharp tokens: with the first-order correction, 4 × 4 cells are as accurate
    as 2 × 2 cells without the correction; without it, a second, coarser level is used, which costs accuracy.
    """
    patches = height * width
    if cell == "auto":
        cell = 4 if order and patches >= 2048 else 2
    if tile == "auto":
        tile = 1 if patches < 400 else 4
    if coarse == "auto":
        coarse = 2 * cell if patches >= 2048 and not order else 0
    if coarse and coarse % cell:
        raise UserError(
            f"coarse={coarse} does not fit cell={cell}: expected a multiple of the cell, or 0 for one level"
        )
    plan = Layout(height, width, prefix, cell, tile, coarse, budget=0)
    own = _most_overlapped(height, tile, cell) * _most_overlapped(width, tile, cell)
    budget = min(plan.cells, max(own, round(keep * plan.cells)))
    # The correction is zero if every cell is chosen, or if a cell holds a single token.
    order = order if budget < plan.cells and max(cell, coarse) > 1 else 0
    return dataclasses.replace(plan, budget=budget, order=order, int8=int(int8))


# Geometry: index tables that depend on the layout alone --------------------------------------------------------------


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _overlap(length: int, size: int, other: int) -> np.ndarray:
    """Along one side, which blocks of `other` patches overlap each block of `size` patches: bool [blocks, others]."""
    start = np.arange(0, length, size)[:, None]
    stop = np.minimum(start + size, length)
    first = np.arange(0, length, other)[None, :]
    return (first < stop) & (first + other > start)


def _most_overlapped(length: int, size: int, other: int) -> int:
    """The largest number of blocks of `other` patches that one block of `size` patches overlaps, along one side."""
    return max((min(start + size, length) - 1) // other - start // other + 1 for start in range(0, length, size))


def own_cells(layout: Layout) -> Tensor:
    """The cells that each tile overlaps, fully or partially: bool [T, cells]."""
    rows = _overlap(layout.height, layout.tile, layout.cell)
    columns = _overlap(layout.width, layout.tile, layout.cell)
    return torch.from_numpy((rows[:, None, :, None] & columns[None, :, None, :]).reshape(layout.tiles, layout.cells))


def patch_blocks(layout: Layout, size: int) -> np.ndarray:
    """The size × size block that contains each patch: [n]."""
    row, column = np.arange(layout.height) // size, np.arange(layout.width) // size
    return (row[:, None] * _blocks(layout.width, size) + column[None, :]).reshape(-1)


def block_of(layout: Layout, size: int, places: Tensor | None = None) -> Tensor:
    """The size × size block that contains each patch: [1, n], or [B, n] for patches at positions `places` [B, n]."""
    if places is None:
        return torch.from_numpy(patch_blocks(layout, size))[None]
    row, column = places // layout.width, places % layout.width
    return row // size * _blocks(layout.width, size) + column // size


def parent_of(layout: Layout) -> Tensor:
    """The coarse cell that contains each cell: [cells]."""
    ratio = layout.coarse // layout.cell
    row = np.arange(_blocks(layout.height, layout.cell)) // ratio
    column = np.arange(_blocks(layout.width, layout.cell)) // ratio
    return torch.from_numpy((row[:, None] * _blocks(layout.width, layout.coarse) + column[None, :]).reshape(-1))


# The rule: what each tile sees ---------------------------------------------------------------------------------------


class Visibility(NamedTuple):
    """What each tile of queries attends to, besides the prefix."""

    #: bool [B, H, T, cells]: the cells whose tokens the tile sees.
    sharp: Tensor
    #: For each of `layout.levels`, bool [B, H, T, count]: the cells the tile sees as one mean.
    blurred: list[Tensor]


def visibility(chosen: Tensor, layout: Layout) -> Visibility:
    """Every patch is visible once: as a token of a chosen cell, in the mean of a cell, or in the mean of a coarse cell.

    A coarse cell is *touched* if one of its cells was chosen. Touched coarse cells are seen cell by cell.

    Args:
        chosen: The cells that each tile sees sharply, integers [B, H, T, M].
        layout: The cells and tiles of the grid.
    """
    chosen = chosen.long()
    sharp = _members(chosen, layout.cells)
    if not layout.coarse:
        return Visibility(sharp, [~sharp])
    parent = parent_of(layout).to(chosen.device)
    touched = _members(parent[chosen], layout.coarse_cells)
    return Visibility(sharp, [~sharp & touched[..., parent], ~touched])


def _members(numbers: Tensor, count: int) -> Tensor:
    """Lists of numbers [B, H, T, M] as sets: bool [B, H, T, count]."""
    return numbers.new_zeros(*numbers.shape[:3], count, dtype=torch.bool).scatter(3, numbers, True)


def _exact(x: Tensor) -> Tensor:
    return x


class Level(NamedTuple):
    """The cells of one blur level, each as one key."""

    #: Means of keys and values: [B, H, count, D], [B, H, count, ·].
    k: Tensor
    v: Tensor
    #: Log of the tokens that each mean represents: [B, count]. Added to the score.
    log_count: Tensor
    #: H of the first-order correction: [B, H, D, ·]. None if `layout.order` is 0.
    slope: Tensor | None


def levels(
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    key_bias: Tensor | None = None,
    places: Tensor | None = None,
    rounding: Callable[[Tensor], Tensor] = _exact,
) -> list[Level]:
    """The means of k [B, H, N, D] and v [B, H, N, ·] at each of `layout.levels`; arguments as for `attend`.

    Patches differ from the mean of their coarse cell as they differ from the mean of their cell, and this mean from the
    other: H of the coarse cells is the sum of both.
    """
    P = layout.prefix
    k, v, weight = k[:, :, P:], v[:, :, P:], _patch_weight(key_bias, P)
    found: list[Level] = []
    turn: Tensor | None = None
    for size, count in layout.levels:
        block = block_of(layout, size, places)
        k_mean, log_count = blur(k, block, count, weight)
        v_mean, _ = blur(v, block, count, weight)
        if layout.order and turn is None:
            turn = slope(k, v, k_mean, v_mean, block, weight, rounding)
        elif turn is not None:
            finer = found[-1]
            empty = finer.log_count == -torch.inf
            patches = finer.log_count.masked_fill(empty, 0).exp().masked_fill(empty, 0)
            turn = turn + slope(finer.k, finer.v, k_mean, v_mean, parent_of(layout)[None], patches, rounding)
        found.append(Level(k_mean, v_mean, log_count, None if turn is None else rounding(turn)))
    return found


# Means, selection and attention --------------------------------------------------------------------------------------


def block_sum(x: Tensor, block: Tensor, count: int) -> Tensor:
    """Sum x [B, H, n, D] over the patches of each block: [B, H, count, D]. `block` is [1 or B, n]."""
    index = block.to(x.device)[:, None, :, None].expand_as(x)
    return x.new_zeros(*x.shape[:2], count, x.shape[-1]).scatter_add(2, index, x)


def blur(x: Tensor, block: Tensor, count: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean of x [B, H, n, D] over each block, weighted by `weight` [B, n], and log Σ weight: [B, H, count, D],
    [B, count].

    An empty block has log-count −inf: it has no weight in a softmax.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    w = wide.new_ones(x.shape[0], 1, x.shape[2], 1) if weight is None else weight.to(wide.dtype)[:, None, :, None]
    total = block_sum(w, block, count)
    mean = block_sum(wide * w, block, count) / torch.where(total > 0, total, 1)
    return mean.to(x.dtype), total[:, 0, :, 0].log()


def slope(
    k: Tensor,
    v: Tensor,
    k_mean: Tensor,
    v_mean: Tensor,
    block: Tensor,
    weight: Tensor | None = None,
    rounding: Callable[[Tensor], Tensor] = _exact,
) -> Tensor:
    """H = Σ w (k − k̄)(v − v̄)ᵀ / Σ w over all patches, k̄ and v̄ the means of the patch's block: [B, H, D, ·].

    `rounding` is applied to both factors.
    """
    block = block.to(k.device)[:, None, :, None]
    wide = torch.promote_types(k.dtype, torch.float32)
    k, v = (
        x.to(wide) - mean.to(wide).gather(2, block.expand(*x.shape[:3], mean.shape[3]))
        for x, mean in ((k, k_mean), (v, v_mean))
    )
    w = k.new_ones(k.shape[0], 1, k.shape[2], 1) if weight is None else weight.to(wide)[:, None, :, None]
    total = w.sum(dim=2, keepdim=True)
    return (rounding(w * k).transpose(-2, -1) @ rounding(v) / torch.where(total > 0, total, 1)).to(k_mean.dtype)


def with_mass(values: Tensor, layout: Layout) -> Tensor:
    """Append one channel per blur level to values [B, H, ·, ·] of tokens and means: 1 at the level's means, else 0.

    After attention, these channels hold the probability mass that each query gives to each level.
    """
    each = torch.eye(len(layout.levels), dtype=values.dtype, device=values.device)
    marks = torch.cat([row.expand(count, -1) for row, (_, count) in zip(each, layout.levels, strict=True)])
    marks = F.pad(marks, (0, 0, values.shape[2] - len(marks), 0))
    return torch.cat([values, marks.expand(*values.shape[:2], -1, -1)], dim=3)


def corrected(out: Tensor, q: Tensor, slopes: list[Tensor], *, scale: float) -> Tensor:
    """Add the first-order correction Σ mass · scale · q H; the last channels of `out` hold the mass of each level."""
    out, mass = out.split([slopes[0].shape[-1], len(slopes)], dim=-1)
    return out + sum(part * (scale * q @ slope) for part, slope in zip(mass.split(1, dim=-1), slopes, strict=True))


def _patch_weight(key_bias: Tensor | None, prefix: int) -> Tensor | None:
    return None if key_bias is None else key_bias[:, prefix:].exp()


@torch.no_grad()
def select(
    q: Tensor, k: Tensor, layout: Layout, *, scale: float, key_bias: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    """The cells that each tile sees sharply: int32 [B, H, T, M], ascending. On equal scores, the lower cell wins.

    `key_bias` [B, N] is the log of the tokens that each key represents. `places` [B, n] gives the grid positions of the
    patches of a reduced set.
    """
    P = layout.prefix
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))  # so that near-equal scores differ
    cell, tile = block_of(layout, layout.cell, places), block_of(layout, layout.tile, places)
    k_mean, log_count = blur(k[:, :, P:], cell, layout.cells, _patch_weight(key_bias, P))
    q_mean, _ = blur(q[:, :, P:], tile, layout.tiles)
    score = scale * q_mean @ k_mean.transpose(-2, -1)
    score = score.masked_fill(log_count[:, None, None] == -torch.inf, -torch.inf)
    score = score.masked_fill(own_cells(layout).to(q.device), torch.inf)
    best = score.sort(dim=-1, descending=True, stable=True).indices[..., : layout.budget]
    return best.sort(dim=-1).values.int()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    layout: Layout,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    places: Tensor | None = None,
    dropout: float = 0.0,
    attention: Callable[..., Tensor] = fused.attend,
    rounding: Callable[[Tensor], Tensor] = _exact,
) -> Tensor:
    """q, k [B, H, N, D], v [B, H, N, ·] and the chosen cells [B, H, T, M] → [B, H, N, ·].

    `attention` computes softmax(scale · q kᵀ + mask) v and `rounding` is applied to H and to what it is made of: `bf16`
    gives its own.
    """
    P, never = layout.prefix, -torch.inf
    token_bias = q.new_zeros(1, k.shape[2]) if key_bias is None else key_bias.to(q.dtype)
    cell, tile = (block_of(layout, size, places).to(q.device) for size in (layout.cell, layout.tile))
    sharp, blurred = visibility(chosen, layout)
    means = levels(k, v, layout, key_bias=key_bias, places=places, rounding=rounding)

    # The bias of each key for each tile, −inf where the tile does not see it: prefix, patches, means of each level.
    exact = sharp.gather(3, cell[:, None, None].expand(*sharp.shape[:3], -1))
    bias = [token_bias[:, None, None, :P].expand(*sharp.shape[:3], -1)]
    bias += [torch.where(exact, token_bias[:, None, None, P:], never)]
    for level, seen in zip(means, blurred, strict=True):
        bias += [torch.where(seen, level.log_count[:, None, None].to(q.dtype), never)]
    mask_BHTK = torch.cat(bias, dim=3)
    mask = mask_BHTK.gather(2, tile[:, None, :, None].expand(*mask_BHTK.shape[:2], -1, mask_BHTK.shape[3]))

    keys = torch.cat([k, *(level.k for level in means)], dim=2)
    values = torch.cat([v, *(level.v for level in means)], dim=2)
    slopes = [level.slope for level in means if level.slope is not None]
    if slopes:
        values = with_mass(values, layout)
    patches = attention(q[:, :, P:], keys, values, mask, scale=scale, dropout=dropout)
    if slopes:
        patches = corrected(patches, q[:, :, P:], slopes, scale=scale)
    if not P:
        return patches
    bias_BK = None if key_bias is None else token_bias[:, None, None]
    prefix = attention(q[:, :, :P], k, v, bias_BK, scale=scale, dropout=dropout)
    return torch.cat([prefix, patches], dim=2)


# Costs ---------------------------------------------------------------------------------------------------------------


def keys_seen(layout: Layout, patches: int) -> int:
    """The most keys a patch query attends to: the prefix, the tokens of the `budget` largest cells, and the means.

    With two levels, the number of means is largest if each chosen cell lies in a coarse cell of its own; neighbouring
    chosen cells leave fewer means. With `coarse`, or with a reduced set of patches, this is therefore an upper bound.
    """
    tokens = block_of(layout, layout.cell)[0].bincount(minlength=layout.cells)
    exact = int(tokens.sort(descending=True).values[: layout.budget].sum())
    rest = layout.cells - layout.budget
    if layout.coarse:
        inside = parent_of(layout).bincount(minlength=layout.coarse_cells).sort(descending=True).values
        touched = min(layout.budget, layout.coarse_cells)
        rest = int(inside[:touched].sum()) - layout.budget + layout.coarse_cells - touched
    return layout.prefix + min(exact + rest, patches)


def slope_macs(layout: Layout, patches: int) -> int:
    """Row products of a head that order 1 adds: H is computed from the patches, the coarse H from H and the cells, and
    each level's H is applied to every patch query."""
    if not layout.order:
        return 0
    made = patches + (layout.cells if layout.coarse else 0)
    return made + len(layout.levels) * patches


def macs(layout: Layout, dim: int, width: int, patches: int | None = None) -> int:
    """Multiply-accumulates for one image of `dim` channels in heads of `width`: selection, patch queries, prefix
    queries and the first-order correction."""
    patches = layout.patches if patches is None else patches
    choosing = layout.tiles * layout.cells
    sharp_and_blurred = 2 * patches * keys_seen(layout, patches)
    prefix = 2 * layout.prefix * (layout.prefix + patches)
    return dim * (choosing + sharp_and_blurred + prefix + width * slope_macs(layout, patches))
