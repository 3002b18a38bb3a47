"""Foveal attention as one Triton kernel, for GPUs. Forward only; with gradients, the definition runs.

A program computes one tile of queries of one head. It reads the prefix and the tokens of the tile's chosen cells,
several cells at a time so that a tensor core has a full block of keys. It then reads the means block by block: means
that the tile does not see are masked, and blocks without a visible mean are skipped. Tokens are read in place; only
the means are materialised.

Tests compare the output with the definition in Triton's interpreter (`TRITON_INTERPRET=1`). The kernel has not been
run or timed on a GPU, so the policies `auto` and `off` never pick it. `ATTENDLESS_CHOOSE=triton` selects it, and
`python benchmarks/attention.py --device cuda` times it.

Shapes: B batch · H heads · N tokens · P prefix · n patches · D head width · T tiles · M cells chosen · C means.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import full
from ..backend import Backend, Case, register_backend
from ..foveal import Layout, attend, block_of, levels, select, visibility

tl: Any = None  # `triton.language`, set by `_kernel`: importing this module does not require Triton
_KEYS = 64


@register_backend
class FovealByTriton(Backend):
    op, name, about, devices = "foveal", "triton", "a Triton kernel, not yet timed on a GPU", ("cuda",)
    select = staticmethod(select)

    def serves(self, device: str) -> bool:
        return super().serves(device) or (device == "cpu" and _interpreting())

    def refuses(self, case: Case) -> str:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if case.device == "cpu" and not _interpreting():
            return "Triton needs a GPU; on the CPU only its interpreter runs (TRITON_INTERPRET=1), for tests"
        if case.dtype == torch.float64:
            return "the Triton kernel accumulates in fp32"
        if case.dropout:
            return "the Triton kernel has no attention dropout"
        if case.plan.int8:
            return "the Triton kernel computes no int8 products"
        return f"heads of {case.width} channels do not fit a GPU's registers" if case.width > 256 else ""

    def macs(self, case: Case) -> int:
        layout = case.plan
        keys = layout.prefix + layout.budget * layout.cell**2 + sum(count for _, count in layout.levels)
        turned = case.width * len(layout.levels) * 2 * layout.patches if layout.order else 0
        prefix = 2 * layout.prefix * layout.tokens
        return case.batch * case.dim * (layout.tiles * layout.cells + 2 * layout.patches * keys + prefix + turned)

    def run(
        self,
        case: Case,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        key_bias: Tensor | None,
        places: Tensor | None,
    ) -> Tensor:
        chosen = self.select(q, k, case.plan, scale=scale, key_bias=key_bias, places=places)
        learning = [x for x in (q, k, v, key_bias) if x is not None and x.requires_grad]
        compute = attend if learning and torch.is_grad_enabled() else _attend
        return compute(q, k, v, chosen, case.plan, scale=scale, key_bias=key_bias, places=places)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _attend(
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
    """As `foveal.attend`."""
    P, device = layout.prefix, q.device
    B, H, _, D = q.shape
    width = v.shape[3]
    bias = None if key_bias is None else key_bias.float().contiguous()
    means = levels(k, v, layout, key_bias=key_bias, places=places)
    k_mean, v_mean = torch.cat([level.k for level in means], dim=2), torch.cat([level.v for level in means], dim=2)
    log_count = torch.cat([level.log_count.float() for level in means], dim=1).contiguous()
    slopes = [level.slope for level in means if level.slope is not None]
    slopes_BHLDE = torch.stack(slopes, dim=2) if slopes else k_mean  # the kernel does not read it where LEVELS is 0
    blurred = torch.cat(visibility(chosen, layout).blurred, dim=3).to(torch.int8)  # [B, H, T, C]

    tile_start, by_tile = _members(block_of(layout, layout.tile, places).to(device), layout.tiles)
    cell_start, by_cell = _members(block_of(layout, layout.cell, places).to(device), layout.cells)
    out = v.new_empty(*q.shape[:3], width)
    _kernel()[(B * H, layout.tiles)](
        q, k, v, out, k_mean, v_mean, log_count, bias, slopes_BHLDE, chosen.contiguous(), blurred,
        tile_start, by_tile, cell_start, by_cell, scale,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        H, k.shape[2], P, D, width, layout.tiles, layout.budget, layout.cells, len(log_count[0]), len(by_tile[0]),
        ONE_ORDER=len(by_tile) == 1, BIASED=bias is not None, LEVELS=len(layout.levels) if layout.order else 0,
        QUERIES=_power(layout.tile**2), CELL=layout.cell**2, KEYS=_KEYS, WIDTH=_power(D), VALUES=_power(width),
    )  # fmt: skip
    if P:
        out[:, :, :P] = full.attend(q[:, :, :P], k, v, scale=scale, key_bias=key_bias)
    return out


def _members(block: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The patches sorted by block, as the start of each block and the order: int32 [1 or B, count + 1] and [·, n]."""
    numbers, order = block.sort(dim=1, stable=True)
    edges = torch.arange(count + 1, device=block.device).expand(len(block), -1).contiguous()
    return torch.searchsorted(numbers.contiguous(), edges).int(), order.int()


def _power(size: int) -> int:
    """The smallest power of two that holds `size` and fills a tensor core."""
    return max(16, 1 << (size - 1).bit_length())


# The kernel, in Triton's language -----------------------------------------------------------------------------------

_meet_block: Any = None  # `_meet`, compiled


@lru_cache(maxsize=1)
def _kernel() -> Any:
    global tl, _meet_block
    import triton
    import triton.language

    tl = triton.language
    _meet_block = triton.jit(_meet)
    return triton.jit(_tile)


def _meet(query, keys, values, bias, scale, most, total, out):
    """Add a block of keys to a running softmax: its new state, the block's weights, and the factor that rescaled the
    state before."""
    score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale + bias[None, :]
    larger = tl.maximum(most, tl.max(score, 1))
    weight = tl.exp(score - larger[:, None])
    shrink = tl.exp(most - larger)
    total = total * shrink + tl.sum(weight, 1)
    out = out * shrink[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return larger, total, out, weight, shrink


def _tile(
    q, k, v, result, k_mean, v_mean, log_count, key_bias, slopes, chosen, blurred,
    tile_start, by_tile, cell_start, by_cell, scale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    heads, tokens, prefix, width, value_width, tiles, budget, cells, means, patches,
    ONE_ORDER: tl.constexpr, BIASED: tl.constexpr, LEVELS: tl.constexpr, QUERIES: tl.constexpr, CELL: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    image, head = row // heads, row % heads
    order = 0 if ONE_ORDER else image  # images share one order unless their tokens were reduced
    d, e, slot, lane = tl.arange(0, WIDTH), tl.arange(0, VALUES), tl.arange(0, KEYS), tl.arange(0, QUERIES)
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h

    tile_start += order * (tiles + 1) + tile
    own = lane < tl.load(tile_start + 1) - tl.load(tile_start)
    token = prefix + tl.load(by_tile + order * patches + tl.load(tile_start) + lane, mask=own, other=0)
    query = tl.load(
        q + image * q_b + head * q_h + token[:, None] * q_n + d[None, :] * q_d,
        mask=own[:, None] & (d < width)[None, :],
        other=0.0,
    )
    most = tl.full([QUERIES], -1e30, tl.float32)  # finite, so that a fully masked block changes nothing
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, VALUES], tl.float32)

    # The prefix, then CELL slots for each chosen cell. A cell at the edge of the grid leaves some of them empty.
    chosen += (row * tiles + tile) * budget
    cell_start += order * (cells + 1)
    for first in range(0, prefix + budget * CELL, KEYS):
        behind = tl.maximum(first + slot - prefix, 0)
        number, place = behind // CELL, behind % CELL
        cell = tl.load(chosen + number, mask=number < budget, other=0)
        at = tl.load(cell_start + cell) + place
        patch = (first + slot >= prefix) & (number < budget) & (at < tl.load(cell_start + cell + 1))
        at = tl.where(patch, prefix + tl.load(by_cell + order * patches + at, mask=patch, other=0), first + slot)
        there = patch | (first + slot < prefix)
        at = tl.where(there, at, 0)
        keys = tl.load(k + at[:, None] * k_n + d[None, :] * k_d, mask=there[:, None] & (d < width)[None, :], other=0.0)
        values = tl.load(
            v + at[:, None] * v_n + e[None, :] * v_d, mask=there[:, None] & (e < value_width)[None, :], other=0.0
        )
        bias = tl.where(there, 0.0, float("-inf"))
        if BIASED:
            bias += tl.load(key_bias + image * tokens + at)
        most, total, out, _, _ = _meet_block(query, keys, values, bias, scale, most, total, out)

    # The means, and the probability mass of each level.
    fine, coarse = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES], tl.float32)
    blurred += (row * tiles + tile) * means
    k_mean += row * means * width
    v_mean += row * means * value_width
    for first in range(0, means, KEYS):
        at = first + slot
        there = tl.load(blurred + at, mask=at < means, other=0) != 0
        if tl.max(there.to(tl.int32), 0) > 0:
            keys = tl.load(
                k_mean + at[:, None] * width + d[None, :], mask=there[:, None] & (d < width)[None, :], other=0.0
            )
            values = tl.load(
                v_mean + at[:, None] * value_width + e[None, :],
                mask=there[:, None] & (e < value_width)[None, :],
                other=0.0,
            )
            bias = tl.load(log_count + image * means + at, mask=there, other=float("-inf"))
            most, total, out, weight, shrink = _meet_block(query, keys, values, bias, scale, most, total, out)
            fine = fine * shrink + tl.sum(tl.where((at < cells)[None, :], weight, 0.0), 1)
            coarse = coarse * shrink + tl.sum(tl.where((at < cells)[None, :], 0.0, weight), 1)

    for level in tl.static_range(LEVELS):  # first-order correction
        slope = tl.load(
            slopes + ((row * LEVELS + level) * width + d[:, None]) * value_width + e[None, :],
            mask=(d < width)[:, None] & (e < value_width)[None, :],
            other=0.0,
        )
        mass = fine if level == 0 else coarse
        out += (mass * scale)[:, None] * tl.dot(query, slope, input_precision="ieee")
    tl.store(
        result + image * o_b + head * o_h + token[:, None] * o_n + e[None, :] * o_d,
        (out / total[:, None]).to(result.dtype.element_ty),
        mask=own[:, None] & (e < value_width)[None, :],
    )
