"""Foveal attention: sharp where a tile of queries looks, blurred everywhere else, one softmax over both.

The patches of the grid are grouped twice: into c × c *cells* of keys and t × t *tiles* of queries (edge ones may be
partial). With w the tokens a key stands for (1, unless tokens were merged), a cell has

    k̄ = Σ w k / Σ w        v̄ = Σ w v / Σ w        n = Σ w

    select   each tile takes the `budget` cells with the highest scale · q̄·k̄, q̄ the mean of its queries; the cells it
             covers itself always come first. The mean of linear scores is the score of the mean query, so choosing
             costs tiles × cells dot products.
    attend   each query: one softmax over the tokens of the chosen cells, every prefix token, and each other cell as
             one key k̄ with score + log n and value v̄. Prefix queries see every token.

With `coarse` the rest is blurred twice: a coarse cell in which nothing was chosen is one key; in the others each cell
that was not chosen is one. No probability mass is dropped, and with every cell chosen this is full attention.

Inside a cell keys and values vary together, and a mean key with a mean value loses that. With `order` 1 what is lost is
given back to first order, as an average over the grid:

    H = Σ w (k − k̄)(v − v̄)ᵀ / Σ w        out_i ← out_i + m_i · scale · q_i H

m_i is the mass query i's softmax gives to blurred cells, k̄ and v̄ are the means of a token's cell. Coarse cells have an
H and a mass of their own.

Shapes: B batch · H heads · N tokens · n patches · D head width · T tiles · M cells chosen.
This file is the definition in PyTorch, differentiable; it masks dense products and is meant to be read and tested
against, not timed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from . import fused

Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a grid is cut into key cells and query tiles, how many cells a tile looks at closely (`budget`), and whether
    what a blur loses is given back to first order (`order`)."""

    height: int
    width: int
    prefix: int
    cell: int
    tile: int
    coarse: int
    budget: int
    order: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """As the kernels read it. (`astuple` would copy every number deeply, at every call.)"""
        return self.height, self.width, self.prefix, self.cell, self.tile, self.coarse, self.budget, self.order

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """Side and number of the cells of each blur, the finer first."""
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
) -> Layout:
    """Cut a grid so that a tile looks closely at a share `keep` of the cells, its own always among them.

    `auto` follows what was measured on a pretrained model (docs/results/foveal.md): on a small grid sixteen queries
    that choose together would spend their budget on themselves, so each query chooses alone. On a large one cells of
    2 × 2 patches, however blurred, cost more than what is seen closely. With the first order larger cells are as close
    as small ones are without; without it a second, coarser blur comes in, which costs accuracy.
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
    # With every cell chosen nothing is blurred; in cells of one token nothing varies.
    order = order if budget < plan.cells and max(cell, coarse) > 1 else 0
    return dataclasses.replace(plan, budget=budget, order=order)


# Where things are: plain functions of the layout ---------------------------------------------------------------------


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _overlap(length: int, size: int, other: int) -> Tensor:
    """Along one side, which blocks of `other` tokens each block of `size` tokens shares one with: [blocks, others]."""
    start = torch.arange(0, length, size)[:, None]
    stop = (start + size).clamp(max=length)
    first = torch.arange(0, length, other)[None, :]
    return (first < stop) & (first + other > start)


def _most_overlapped(length: int, size: int, other: int) -> int:
    """The most blocks of `other` tokens that one block of `size` tokens touches, along one side."""
    return max((min(start + size, length) - 1) // other - start // other + 1 for start in range(0, length, size))


def own_cells(layout: Layout) -> Tensor:
    """The cells each tile covers, wholly or in part: bool [T, cells]."""
    rows = _overlap(layout.height, layout.tile, layout.cell)
    columns = _overlap(layout.width, layout.tile, layout.cell)
    return (rows[:, None, :, None] & columns[None, :, None, :]).reshape(layout.tiles, layout.cells)


def block_of(layout: Layout, size: int, places: Tensor | None = None) -> Tensor:
    """The size × size block each patch lies in: [1, n], or [B, n] for the patches that stand at `places` [B, n]."""
    if places is None:
        places = torch.arange(layout.patches)[None]
    row, column = places // layout.width, places % layout.width
    return row // size * _blocks(layout.width, size) + column // size


def parent_of(layout: Layout) -> Tensor:
    """The coarse cell each cell lies in: [cells]."""
    rows, columns = _blocks(layout.height, layout.cell), _blocks(layout.width, layout.cell)
    ratio = layout.coarse // layout.cell
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    return (row // ratio * _blocks(layout.width, layout.coarse) + column // ratio).flatten()


# What is computed ----------------------------------------------------------------------------------------------------


def block_sum(x: Tensor, block: Tensor, count: int) -> Tensor:
    """Sum x [B, H, n, D] over the patches of each block: [B, H, count, D]. `block` is [1 or B, n]."""
    index = block.to(x.device)[:, None, :, None].expand_as(x)
    return x.new_zeros(*x.shape[:2], count, x.shape[-1]).scatter_add(2, index, x)


def blur(x: Tensor, block: Tensor, count: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean of x [B, H, n, D] in each block, by `weight` [B, n], and log Σ weight: [B, H, count, D], [B, count].

    An empty block has log-count −inf, so that it vanishes from a softmax.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    w = wide.new_ones(x.shape[0], 1, x.shape[2], 1) if weight is None else weight.to(wide.dtype)[:, None, :, None]
    total = block_sum(w, block, count)
    mean = block_sum(wide * w, block, count) / torch.where(total > 0, total, 1)
    return mean.to(x.dtype), total[:, 0, :, 0].log()


def slope(k: Tensor, v: Tensor, k_mean: Tensor, v_mean: Tensor, block: Tensor, weight: Tensor | None = None) -> Tensor:
    """H = Σ w (k − k̄)(v − v̄)ᵀ / Σ w over all patches: [B, H, D, ·]. How values turn with keys inside a block."""
    block = block.to(k.device)[:, None, :, None]
    wide = torch.promote_types(k.dtype, torch.float32)
    k, v = (
        x.to(wide) - mean.to(wide).gather(2, block.expand(*x.shape[:3], mean.shape[3]))
        for x, mean in ((k, k_mean), (v, v_mean))
    )
    w = k.new_ones(k.shape[0], 1, k.shape[2], 1) if weight is None else weight.to(wide)[:, None, :, None]
    total = w.sum(dim=2, keepdim=True)
    return ((w * k).transpose(-2, -1) @ v / torch.where(total > 0, total, 1)).to(k_mean.dtype)


def marked(values: Tensor, layout: Layout) -> Tensor:
    """Values [B, H, ·, ·] of tokens and means with a channel more for each level of blur, 1 at that level's means: what
    a softmax makes of it is the mass they get."""
    each = torch.eye(len(layout.levels), dtype=values.dtype, device=values.device)
    marks = torch.cat([row.expand(count, -1) for row, (_, count) in zip(each, layout.levels, strict=True)])
    marks = F.pad(marks, (0, 0, values.shape[2] - len(marks), 0))
    return torch.cat([values, marks.expand(*values.shape[:2], -1, -1)], dim=3)


def turned(out: Tensor, q: Tensor, slopes: list[Tensor], *, scale: float) -> Tensor:
    """The mass of each level, in the last channels of `out`, times scale · q H, added to the others."""
    out, mass = out.split([slopes[0].shape[-1], len(slopes)], dim=-1)
    return out + sum(part * (scale * q @ slope) for part, slope in zip(mass.split(1, dim=-1), slopes, strict=True))


def _patch_weight(key_bias: Tensor | None, prefix: int) -> Tensor | None:
    return None if key_bias is None else key_bias[:, prefix:].exp()


@torch.no_grad()
def select(
    q: Tensor, k: Tensor, layout: Layout, *, scale: float, key_bias: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    """The cells each tile looks at closely: int32 [B, H, T, M], ascending. Equal scores: the lower cell first.

    `key_bias` [B, N] is the log of the tokens each key stands for; `places` [B, n] says where on the grid the patches
    of a reduced set stand.
    """
    P = layout.prefix
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
) -> Tensor:
    """q, k [B, H, N, D], v [B, H, N, ·] and the chosen cells [B, H, T, M] → [B, H, N, ·]."""
    P, never = layout.prefix, -torch.inf
    device, weight = q.device, _patch_weight(key_bias, layout.prefix)
    token_bias = q.new_zeros(1, k.shape[2]) if key_bias is None else key_bias.to(q.dtype)
    cell = block_of(layout, layout.cell, places).to(device)

    sharp = chosen.new_zeros(*chosen.shape[:3], layout.cells, dtype=torch.bool).scatter(3, chosen.long(), True)
    exact = sharp.gather(3, cell[:, None, None].expand(*sharp.shape[:3], -1))
    blurred = [~sharp]
    if layout.coarse:
        parent = parent_of(layout).to(device)
        touched = sharp.new_zeros(*sharp.shape[:3], layout.coarse_cells).scatter(3, parent[chosen.long()], True)
        blurred = [~sharp & touched[..., parent], ~touched]

    keys, values, slopes = [k], [v], []
    bias = [token_bias[:, None, None, :P].expand(*sharp.shape[:3], -1)]
    bias += [torch.where(exact, token_bias[:, None, None, P:], never)]
    for (size, count), seen in zip(layout.levels, blurred, strict=True):
        block = block_of(layout, size, places)
        k_mean, log_count = blur(k[:, :, P:], block, count, weight)
        v_mean, _ = blur(v[:, :, P:], block, count, weight)
        keys, values = [*keys, k_mean], [*values, v_mean]
        bias += [torch.where(seen, log_count[:, None, None].to(q.dtype), never)]
        if layout.order:
            slopes += [slope(k[:, :, P:], v[:, :, P:], k_mean, v_mean, block, weight)]

    tile = block_of(layout, layout.tile, places).to(device)
    mask_BHTK = torch.cat(bias, dim=3)
    mask = mask_BHTK.gather(2, tile[:, None, :, None].expand(*mask_BHTK.shape[:2], -1, mask_BHTK.shape[3]))
    all_values = torch.cat(values, dim=2)
    if slopes:
        all_values = marked(all_values, layout)
    patches = fused.attend(q[:, :, P:], torch.cat(keys, dim=2), all_values, mask, scale=scale, dropout=dropout)
    if slopes:
        patches = turned(patches, q[:, :, P:], slopes, scale=scale)
    if not P:
        return patches
    bias_BK = None if key_bias is None else token_bias[:, None, None]
    prefix = fused.attend(q[:, :, :P], k, v, bias_BK, scale=scale, dropout=dropout)
    return torch.cat([prefix, patches], dim=2)


def keys_seen(layout: Layout, patches: int) -> int:
    """Keys a patch query meets at most: the tokens of the largest `budget` cells, the prefix, and the blurred rest.

    In two levels the rest is largest when the chosen cells lie apart, each in a coarse cell of its own; cells chosen
    side by side leave fewer keys, so with `coarse`, as with a reduced set of patches, this is an upper bound.
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
    """Products of two rows of a head that order 1 takes: an H is made of the patches, a coarse one from it and the
    cells, and each is applied to every patch query."""
    if not layout.order:
        return 0
    made = patches + (layout.cells if layout.coarse else 0)
    return made + len(layout.levels) * patches


def macs(layout: Layout, dim: int, width: int, patches: int | None = None) -> int:
    """Multiply-accumulates for one image of `dim` channels in heads of `width`: choosing, patch queries, prefix
    queries, and what `order` adds."""
    patches = layout.patches if patches is None else patches
    choosing = layout.tiles * layout.cells
    sharp_and_blurred = 2 * patches * keys_seen(layout, patches)
    prefix = 2 * layout.prefix * (layout.prefix + patches)
    return dim * (choosing + sharp_and_blurred + prefix + width * slope_macs(layout, patches))
