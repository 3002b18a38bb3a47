"""Foveal attention as other runtimes' standard operators compute it soonest: pooling, top-k, gather, one softmax.

The same function as in `foveal`, for a grid from which no patch was taken. Patches are put in the order of their cells,
so that a chosen cell is one row to copy; queries in the order of their tiles, so that a tile's share one product. No
product of every query with every key is made.

Shapes: B batch · H heads · T tiles · t queries in a tile · M cells chosen · G cells · c tokens in a cell · D, E widths.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .foveal import Layout


def pays(layout: Layout) -> bool:
    """Whether copying a tile's keys costs less than computing with all of them: if enough queries share them."""
    return layout.tile >= 2 and 2 * layout.budget * layout.cell**2 <= layout.patches


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """q, k [B, H, N, D], v [B, H, N, E] → [B, H, N, E]."""
    P = layout.prefix
    q_tiles, _ = in_blocks(q[:, :, P:], layout, layout.tile)
    fine = _Blur(k[:, :, P:], v[:, :, P:], layout, layout.cell)
    chosen = _choose(_mean(q_tiles, layout, layout.tile), fine.k_mean, layout, scale)
    sharp = _marked(chosen, layout.cells)
    k_sharp, v_sharp = (_rows(cells, chosen) for cells in (fine.k, fine.v))

    scores = [(scale * q_tiles) @ k_sharp.transpose(-2, -1)]
    if not fine.full:
        real = fine.real.to(q.device)[chosen].flatten(3)
        scores[0] = scores[0].masked_fill(~real[:, :, :, None], -torch.inf)
    levels, seen = [fine], [~sharp]
    if layout.coarse:
        parent = torch.from_numpy(_parents(layout)).to(q.device)
        touched = _marked(parent[chosen], layout.coarse_cells)
        levels.append(_Blur(k[:, :, P:], v[:, :, P:], layout, layout.coarse))
        seen = [~sharp & touched[..., parent], ~touched]
    for level, there in zip(levels, seen, strict=True):
        blurred = (scale * q_tiles) @ level.k_mean[:, :, None].transpose(-2, -1) + level.log_count.to(q)
        scores.append(blurred.masked_fill(~there[:, :, :, None], -torch.inf))
    if P:
        scores.append((scale * q_tiles) @ k[:, :, None, :P].transpose(-2, -1))

    widths = [part.shape[-1] for part in scores]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).split(widths, dim=-1)
    out = weights[0] @ v_sharp
    for level, weight in zip(levels, weights[1:], strict=False):
        out = out + weight @ level.v_mean[:, :, None]
        if layout.order:
            out = out + weight.sum(-1, keepdim=True) * ((scale * q_tiles) @ level.slope()[:, :, None])
    if P:
        out = out + weights[-1] @ v[:, :, None, :P]
    back = torch.from_numpy(_inverse(layout, layout.tile)).to(q.device)
    out = out.flatten(2, 3).index_select(2, back)
    if not P:
        return out
    prefix = F.scaled_dot_product_attention(q[:, :, :P], k, v, scale=scale)
    return torch.cat([prefix, out], dim=2)


class _Blur:
    """Keys and values by cells of one size, their means, and how many each stands for.

    All that follows from the layout alone is made outside PyTorch, so that a graph holds it as constants.
    """

    def __init__(self, k: Tensor, v: Tensor, layout: Layout, size: int) -> None:
        self.k, self.real = in_blocks(k, layout, size)
        self.v, _ = in_blocks(v, layout, size)
        self.patches, self.full = layout.patches, bool(_blocks(layout, size)[1].all())
        self.k_mean, self.v_mean = (_mean(x, layout, size) for x in (self.k, self.v))
        self.log_count = torch.from_numpy(np.log(_blocks(layout, size)[1].sum(1, dtype=np.float32)))

    def slope(self) -> Tensor:
        """As `foveal.slope`: [B, H, D, E]."""
        k, v = (x - m[:, :, :, None] for x, m in ((self.k, self.k_mean), (self.v, self.v_mean)))
        if not self.full:
            k = k * self.real.to(k)[:, :, None]
        return k.flatten(2, 3).transpose(-2, -1) @ v.flatten(2, 3) / self.patches


def in_blocks(x: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
    """Patches x [B, H, n, D] by blocks of size × size [B, H, G, c, D], and which are no padding, bool [G, c]."""
    index, real = (torch.from_numpy(array) for array in _blocks(layout, size))
    found = x.index_select(2, index.flatten().to(x.device))
    return found.unflatten(2, tuple(index.shape)), real


def _mean(x: Tensor, layout: Layout, size: int) -> Tensor:
    """Over each block: [B, H, G, c, D] → [B, H, G, D]."""
    real = _blocks(layout, size)[1]
    if real.all():
        return x.mean(3)
    share = (real / real.sum(1, keepdims=True)).astype(np.float32)
    return (x * torch.from_numpy(share).to(x)[:, :, None]).sum(3)


def _choose(q_mean: Tensor, k_mean: Tensor, layout: Layout, scale: float) -> Tensor:
    score = (scale * q_mean) @ k_mean.transpose(-2, -1)
    score = score.masked_fill(torch.from_numpy(_own(layout)).to(score.device), torch.inf)
    return score.topk(layout.budget, dim=-1).indices


def _marked(chosen: Tensor, count: int) -> Tensor:
    """Numbers [B, H, T, M] as a choice among `count`: bool [B, H, T, count]."""
    return chosen.new_zeros(*chosen.shape[:3], count, dtype=torch.bool).scatter(3, chosen, True)


def _rows(cells: Tensor, chosen: Tensor) -> Tensor:
    """The tokens of the chosen cells, for every tile: cells [B, H, G, c, D] → [B, H, T, M · c, D]."""
    B, H, G, c, D = cells.shape
    T, M = chosen.shape[2:]
    head = torch.arange(B * H, device=cells.device).view(B, H, 1, 1) * G
    rows = cells.reshape(B * H * G, c * D).index_select(0, (chosen + head).flatten())
    return rows.view(B, H, T, M * c, D)


@lru_cache(maxsize=64)
def _blocks(layout: Layout, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The patches of every block [G, c], a partial one filled up with its first, and which are no such filling."""
    block = _block_of(layout, size)
    lists = [np.flatnonzero(block == number) for number in range(block.max() + 1)]
    most = max(map(len, lists))
    real = np.arange(most) < np.array([[len(each)] for each in lists])
    index = np.stack([np.append(each, np.full(most - len(each), each[0])) for each in lists])
    return index, real


@lru_cache(maxsize=64)
def _own(layout: Layout) -> np.ndarray:
    """As `foveal.own_cells`: bool [T, G]."""
    own = np.zeros((layout.tiles, layout.cells), dtype=bool)
    own[_block_of(layout, layout.tile), _block_of(layout, layout.cell)] = True
    return own


@lru_cache(maxsize=64)
def _parents(layout: Layout) -> np.ndarray:
    """As `foveal.parent_of`: [G]."""
    parents = np.zeros(layout.cells, dtype=np.int64)
    parents[_block_of(layout, layout.cell)] = _block_of(layout, layout.coarse)
    return parents


def _block_of(layout: Layout, size: int) -> np.ndarray:
    row, column = np.divmod(np.arange(layout.patches), layout.width)
    return row // size * -(-layout.width // size) + column // size


@lru_cache(maxsize=64)
def _inverse(layout: Layout, size: int) -> np.ndarray:
    """Where each patch lies among those of all blocks."""
    index, real = _blocks(layout, size)
    where = np.empty(layout.patches, dtype=np.int64)
    where[index[real]] = np.flatnonzero(real)
    return where
