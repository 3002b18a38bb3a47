"""Foveal attention from the standard operators of other runtimes: pooling, top-k, gather, one softmax.

The function is that of `foveal`, for a grid with all of its patches. Patches are sorted by cell, so that gathering a
chosen cell copies one row; queries are sorted by tile, so that a tile's queries share one product. No product of every
query with every key is computed.

Shapes: B batch · H heads · T tiles · t queries in a tile · M cells chosen · G cells · c tokens in a cell · D, E widths.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .foveal import Layout, Level, own_cells, patch_blocks, visibility


def pays(layout: Layout) -> bool:
    """Whether gathering a tile's keys costs less than attending to all of them, because enough queries share them."""
    return layout.tile >= 2 and 2 * layout.budget * layout.cell**2 <= layout.patches


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """q, k [B, H, N, D], v [B, H, N, E] → [B, H, N, E]."""
    P = layout.prefix
    k_patches, v_patches = k[:, :, P:], v[:, :, P:]
    q_tiles, k_cells, v_cells = (
        in_blocks(x, layout, size)
        for x, size in ((q[:, :, P:], layout.tile), (k_patches, layout.cell), (v_patches, layout.cell))
    )
    levels = [_level(k_cells, v_cells, layout, layout.cell)]
    chosen = _select(_mean(q_tiles, layout, layout.tile), levels[0].k, layout, scale)
    if layout.coarse:
        k_coarse, v_coarse = (in_blocks(x, layout, layout.coarse) for x in (k_patches, v_patches))
        levels.append(_level(k_coarse, v_coarse, layout, layout.coarse))

    k_sharp, v_sharp = (_rows(cells, chosen) for cells in (k_cells, v_cells))
    scores = [(scale * q_tiles) @ k_sharp.transpose(-2, -1)]
    real = _blocks(layout, layout.cell)[1]
    if not real.all():
        padded = ~torch.from_numpy(real).to(q.device)[chosen].flatten(3)
        scores[0] = scores[0].masked_fill(padded[:, :, :, None], -torch.inf)
    for level, seen in zip(levels, visibility(chosen, layout).blurred, strict=True):
        blurred = (scale * q_tiles) @ level.k[:, :, None].transpose(-2, -1) + level.log_count.to(q)
        scores.append(blurred.masked_fill(~seen[:, :, :, None], -torch.inf))
    if P:
        scores.append((scale * q_tiles) @ k[:, :, None, :P].transpose(-2, -1))

    widths = [part.shape[-1] for part in scores]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).split(widths, dim=-1)
    out = weights[0] @ v_sharp
    for level, weight in zip(levels, weights[1:], strict=False):
        out = out + weight @ level.v[:, :, None]
        if level.slope is not None:
            out = out + weight.sum(-1, keepdim=True) * ((scale * q_tiles) @ level.slope[:, :, None])
    if P:
        out = out + weights[-1] @ v[:, :, None, :P]
    back = torch.from_numpy(_inverse(layout, layout.tile)).to(q.device)
    out = out.flatten(2, 3).index_select(2, back)
    if not P:
        return out
    prefix = F.scaled_dot_product_attention(q[:, :, :P], k, v, scale=scale)
    return torch.cat([prefix, out], dim=2)


def _level(k: Tensor, v: Tensor, layout: Layout, size: int) -> Level:
    """As an item of `foveal.levels`, from keys and values in blocks [B, H, G, c, ·]. Padding is a copy of a real patch:
    it has no weight in the means, and none in the slope."""
    k_mean, v_mean = (_mean(x, layout, size) for x in (k, v))
    real = _blocks(layout, size)[1]
    log_count = torch.from_numpy(np.log(real.sum(1, dtype=np.float32)))
    if not layout.order:
        return Level(k_mean, v_mean, log_count, None)
    k, v = k - k_mean[:, :, :, None], v - v_mean[:, :, :, None]
    if not real.all():
        k = k * torch.from_numpy(real).to(k)[:, :, None]
    slope = k.flatten(2, 3).transpose(-2, -1) @ v.flatten(2, 3) / layout.patches
    return Level(k_mean, v_mean, log_count, slope)


def in_blocks(x: Tensor, layout: Layout, size: int) -> Tensor:
    """Patches x [B, H, n, D] grouped by blocks of size × size: [B, H, G, c, D]. Partial blocks are padded."""
    index, _ = _blocks(layout, size)
    found = x.index_select(2, torch.from_numpy(index).flatten().to(x.device))
    return found.unflatten(2, index.shape)


def _mean(x: Tensor, layout: Layout, size: int) -> Tensor:
    """The mean of each block, without padding: [B, H, G, c, D] → [B, H, G, D]."""
    real = _blocks(layout, size)[1]
    if real.all():
        return x.mean(3)
    share = (real / real.sum(1, keepdims=True)).astype(np.float32)
    return (x * torch.from_numpy(share).to(x)[:, :, None]).sum(3)


def _select(q_mean: Tensor, k_mean: Tensor, layout: Layout, scale: float) -> Tensor:
    """As `foveal.select`, but int64 and in order of score: [B, H, T, M]."""
    score = (scale * q_mean) @ k_mean.transpose(-2, -1)
    score = score.masked_fill(own_cells(layout).to(score.device), torch.inf)
    return score.topk(layout.budget, dim=-1).indices


def _rows(cells: Tensor, chosen: Tensor) -> Tensor:
    """The tokens of each tile's chosen cells: cells [B, H, G, c, D] → [B, H, T, M · c, D]."""
    B, H, G, c, D = cells.shape
    T, M = chosen.shape[2:]
    head = torch.arange(B * H, device=cells.device).view(B, H, 1, 1) * G
    rows = cells.reshape(B * H * G, c * D).index_select(0, (chosen + head).flatten())
    return rows.view(B, H, T, M * c, D)


@lru_cache(maxsize=64)
def _blocks(layout: Layout, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The patches of each block [G, c], padded with the block's first patch, and which entries are not padding."""
    block = patch_blocks(layout, size)
    lists = [np.flatnonzero(block == number) for number in range(block.max() + 1)]
    most = max(map(len, lists))
    real = np.arange(most) < np.array([[len(each)] for each in lists])
    index = np.stack([np.append(each, np.full(most - len(each), each[0])) for each in lists])
    return index, real


@lru_cache(maxsize=64)
def _inverse(layout: Layout, size: int) -> np.ndarray:
    """The position of each patch among the entries of all blocks, flattened."""
    index, real = _blocks(layout, size)
    where = np.empty(layout.patches, dtype=np.int64)
    where[index[real]] = np.flatnonzero(real)
    return where
