"""Foveal attention through PyTorch's FlexAttention: the same function, for GPUs.

Keys stand in the order prefix, patches cell by cell, the mean of each cell, the mean of each coarse cell; queries in
the order prefix, patches tile by tile. Then most blocks of 128 × 128 pairs hold nothing that is seen, and FlexAttention
skips them. What is seen is a small table: which group of keys (the prefix, a cell's tokens, a mean) each tile looks at.
Every tensor's shape follows from the layout alone, whatever was chosen, so a compiled graph serves every image.

Its result is tested against the definition on the CPU, where FlexAttention has no gradients and the native kernels are
quicker. Its speed on CUDA, and its gradients there, have not been tested: no such machine was at hand.

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
from ..foveal import (
    Layout,
    block_of,
    blur,
    macs,
    marked,
    parent_of,
    select,
    slope,
    turned,
)

_BLOCK = 128


@register_backend
class FovealByFlex(Backend):
    op, name, about, standing, devices = "foveal", "flex", "FlexAttention skips what is not seen", 2, ("cuda",)
    select = staticmethod(select)

    def refuses(self, case: Case) -> str:
        if case.dropout:
            return "FlexAttention does not drop attention weights at random"
        if case.dtype == torch.float64:
            return "FlexAttention has no 64-bit floats"
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
    weight = None if key_bias is None else key_bias[:, P:].exp()
    bias = q.new_zeros(len(q), k.shape[2]) if key_bias is None else key_bias.to(q.dtype)
    keys, values, biases = [_rows(k, by_cell)], [_rows(v, by_cell)], [bias.gather(1, by_cell.expand_as(bias))]
    groups, first, slopes = [group_of], layout.cells + 1, []
    for size, count in layout.levels:
        block = block_of(layout, size, places)
        k_mean, log_count = blur(k[:, :, P:], block, count, weight)
        v_mean, _ = blur(v[:, :, P:], block, count, weight)
        keys, values = [*keys, k_mean], [*values, v_mean]
        if layout.order:
            slopes += [slope(k[:, :, P:], v[:, :, P:], k_mean, v_mean, block, weight)]
        biases += [log_count.to(q.dtype)]
        groups += [torch.arange(first, first + count, device=device).expand(len(group_of), -1)]
        first += count

    key_bias_BK = torch.cat(biases, dim=1)
    mask = _block_mask(_sees(chosen, layout), tile_of, torch.cat(groups, dim=1))

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + key_bias_BK[b, j]

    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    all_keys, all_values = torch.cat(keys, dim=2), torch.cat(values, dim=2)
    if slopes:
        all_values = marked(all_values, layout)
    out = run(_rows(q, by_tile), all_keys, all_values, add_bias, block_mask=mask, scale=scale)
    out = _rows(out, by_tile.argsort(dim=1))
    return turned(out, q, slopes, scale=scale) if slopes else out


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _in_order(block: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Tokens sorted by their block [1 or B, n], the prefix first as block 0: each one's block and its old place."""
    front = block.new_zeros(len(block), prefix)
    numbers, order = torch.cat([front, block + 1], dim=1).sort(dim=1, stable=True)
    return numbers, order


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, N, ·] with its tokens in the given order [1 or B, N]."""
    if len(order) == 1:
        return x.index_select(2, order[0])
    return x.gather(2, order[:, None, :, None].expand_as(x))


def _sees(chosen: Tensor, layout: Layout) -> Tensor:
    """Which groups each tile sees, bool [B, H, 1 + T, G]. Row 0 is the prefix: every token and no mean.

    Groups: the prefix, the tokens of each cell, the mean of each cell, the mean of each coarse cell.
    """
    shape, device = chosen.shape[:3], chosen.device
    sharp = torch.zeros(*shape, layout.cells, dtype=torch.bool, device=device).scatter(3, chosen.long(), True)
    parts = [sharp.new_ones(*shape, 1), sharp, ~sharp]
    if layout.coarse:
        parent = parent_of(layout).to(device)
        touched = sharp.new_zeros(*shape, layout.coarse_cells).scatter(3, parent[chosen.long()], True)
        parts = [*parts[:2], ~sharp & touched[..., parent], ~touched]
    tiles = torch.cat(parts, dim=3)
    prefix = torch.arange(tiles.shape[3], device=device) <= layout.cells
    return torch.cat([prefix.expand(*shape[:2], 1, -1), tiles], dim=2)


def _block_mask(sees: Tensor, tile_of: Tensor, group_of: Tensor) -> BlockMask:
    """The mask of pairs, and the blocks that hold any: query i sees key j if its tile sees j's group.

    A block is needed if any of its tiles sees any of its groups: two small products, never a mask of all pairs.
    """
    tiles, groups = (_members(x, n) for x, n in zip((tile_of, group_of), sees.shape[2:], strict=True))
    needed = (tiles[:, None] @ sees.float() @ groups[:, None].transpose(-2, -1)) > 0
    order = needed.to(torch.int8).argsort(dim=3, descending=True, stable=True).int()

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # One order serves the whole batch unless tokens were dropped.
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
