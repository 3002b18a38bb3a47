"""Foveal attention through PyTorch's FlexAttention, for GPUs.

Keys are sorted: prefix, patches by cell, the mean of each cell, the mean of each coarse cell. Queries are sorted:
prefix, patches by tile. Most blocks of 128 × 128 pairs then hold no visible pair, and FlexAttention skips them. A small
table says which group of keys (the prefix, the tokens of a cell, a mean) each tile sees. Every tensor shape follows
from the layout alone, so one compiled graph serves every image.

Tests compare the output with the definition on the CPU, where FlexAttention has no gradients and the native kernels
are faster. Speed and gradients on CUDA have not been tested.

Shapes: B batch · H heads · N tokens · P prefix · T tiles · G groups of keys · K keys and means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..backend import Backend, Case, register_backend
from ..foveal import Layout, block_of, corrected, levels, macs, select, visibility, with_mass

_BLOCK = 128


@register_backend
class FovealByFlex(Backend):
    op, name, about, standing, devices = "foveal", "flex", "FlexAttention skips blocks that nothing sees", 2, ("cuda",)
    select = staticmethod(select)

    def refuses(self, case: Case) -> str:
        if case.dropout:
            return "FlexAttention has no attention dropout"
        if case.op == "foveal" and case.plan.int8:
            return "FlexAttention computes no int8 products"
        if case.dtype == torch.float64:
            return "FlexAttention does not support fp64"
        return f"FlexAttention needs heads at least 16 wide, these are {case.width}" if case.width < 16 else ""

    def macs(self, case: Case) -> int:
        return case.batch * macs(case.plan, case.dim, case.width)

    def run(self, case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **where: Tensor | None) -> Tensor:
        chosen = self.select(q, k, case.plan, scale=scale, **where)
        return attend(q, k, v, chosen, case.plan, scale=scale, **where)


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
) -> Tensor:
    """As `foveal.attend`: q, k [B, H, N, D], v [B, H, N, ·] and the chosen cells [B, H, T, M] → [B, H, N, ·]."""
    P, device = layout.prefix, q.device
    tile_of, by_tile = _in_order(block_of(layout, layout.tile, places).to(device), P)
    group_of, by_cell = _in_order(block_of(layout, layout.cell, places).to(device), P)
    means = levels(k, v, layout, key_bias=key_bias, places=places)
    bias = q.new_zeros(len(q), k.shape[2]) if key_bias is None else key_bias.to(q.dtype)
    biases = [bias.gather(1, by_cell.expand_as(bias)), *(level.log_count.to(q.dtype) for level in means)]
    key_bias_BK = torch.cat(biases, dim=1)
    # Each mean is a group of its own, numbered after the prefix and the cells.
    numbers = torch.arange(layout.cells + 1, layout.cells + 1 + sum(count for _, count in layout.levels), device=device)
    groups = torch.cat([group_of, numbers.expand(len(group_of), -1)], dim=1)
    mask = _block_mask(_sees(chosen, layout), tile_of, groups)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + key_bias_BK[b, j]

    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    keys = torch.cat([_rows(k, by_cell), *(level.k for level in means)], dim=2)
    values = torch.cat([_rows(v, by_cell), *(level.v for level in means)], dim=2)
    slopes = [level.slope for level in means if level.slope is not None]
    if slopes:
        values = with_mass(values, layout)
    out = run(_rows(q, by_tile), keys, values, add_bias, block_mask=mask, scale=scale)
    out = _rows(out, by_tile.argsort(dim=1))
    return corrected(out, q, slopes, scale=scale) if slopes else out


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _in_order(block: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """The tokens sorted by block [1 or B, n], the prefix first as block 0: each token's block, and its old index."""
    front = block.new_zeros(len(block), prefix)
    numbers, order = torch.cat([front, block + 1], dim=1).sort(dim=1, stable=True)
    return numbers, order


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, N, ·] with its tokens in the given order [1 or B, N]."""
    if len(order) == 1:
        return x.index_select(2, order[0])
    return x.gather(2, order[:, None, :, None].expand_as(x))


def _sees(chosen: Tensor, layout: Layout) -> Tensor:
    """Which groups each tile sees: bool [B, H, 1 + T, G]. Row 0 is the prefix, which sees every token and no mean.

    Groups: the prefix, the tokens of each cell, the mean of each cell, the mean of each coarse cell.
    """
    sharp, blurred = visibility(chosen, layout)
    tiles = torch.cat([sharp.new_ones(*sharp.shape[:3], 1), sharp, *blurred], dim=3)
    prefix = torch.arange(tiles.shape[3], device=chosen.device) <= layout.cells
    return torch.cat([prefix.expand(*tiles.shape[:2], 1, -1), tiles], dim=2)


def _block_mask(sees: Tensor, tile_of: Tensor, group_of: Tensor) -> BlockMask:
    """The mask of pairs and the blocks that hold any: query i sees key j if the tile of i sees the group of j.

    A block is needed if any of its tiles sees any of its groups. Two small products find these blocks; no mask of all
    pairs is built.
    """
    tiles, groups = (_members(x, n) for x, n in zip((tile_of, group_of), sees.shape[2:], strict=True))
    needed = (tiles[:, None] @ sees.float() @ groups[:, None].transpose(-2, -1)) > 0
    order = needed.to(torch.int8).argsort(dim=3, descending=True, stable=True).int()

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Images share one order unless their tokens were reduced.
        return sees[b, h, tile_of[b % len(tile_of), i], group_of[b % len(group_of), j]]

    return BlockMask.from_kv_blocks(
        needed.sum(dim=3, dtype=torch.int32),
        order,
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(tile_of.shape[1], group_of.shape[1]),
    )


def _members(number: Tensor, count: int) -> Tensor:
    """Which of `count` numbers occur in each block of 128 tokens: float [1 or B, blocks, count]."""
    padded = torch.nn.functional.pad(number, (0, -number.shape[1] % _BLOCK), value=count)
    blocks = padded.unflatten(1, (-1, _BLOCK))
    return torch.zeros(*blocks.shape[:2], count + 1, device=number.device).scatter(2, blocks, 1.0)[..., :count]
