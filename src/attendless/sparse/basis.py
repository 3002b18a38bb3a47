"""A few averages that represent all tokens: pooled cells of the grid, and smooth bumps that spread them back.

    down [R, N]   each row averages the keys of one cell; a prefix token is a cell of its own
    up   [R, N]   each row says how much a token belongs to one cell: a bump around it, fading into its neighbours

Both initialise learned low-rank attention: without training, `softmax(q (down k)ᵀ) up` is a blurred attention map.
`Rest` uses such averages for the keys that a query did not choose. Learned averages would be worse there: they are
trained to tell keys apart, not to represent them.

R averages need not form a rectangle: the grid is cut into bands of rows, and each band into its share of cells.

Shapes: B batch · H heads · N tokens, prefix first · R averages · D head width.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError

#: The number of patches for which weights and thresholds are stated: 224 px in patches of 16.
_PATCHES = 14 * 14


def cells(height: int, width: int, count: int) -> list[int]:
    """Cut a grid into `count` cells, as square as possible: the cell of each patch, row by row."""
    if not 0 < count <= height * width:
        raise UserError(f"a grid of {height}x{width} patches cannot be cut into {count} cells")
    bands = min(height, count, max(1, round((count * height / width) ** 0.5)))
    bands = max(bands, -(-count // width))  # a band has at most as many cells as patches in a row
    firsts = [band * count // bands for band in range(bands + 1)]
    found = []
    for row in range(height):
        first, end = firsts[row * bands // height], firsts[row * bands // height + 1]
        found += [first + column * (end - first) // width for column in range(width)]
    return found


def pooling(height: int, width: int, prefix: int, rank: int) -> tuple[Tensor, Tensor]:
    """`down` and `up` of `rank` averages, both [R, N]. The column of a patch in `up` sums to the mean share of a cell.
    Above 14 × 14 patches it sums to the share on 14 × 14, as after `resample`: a threshold means the same on every
    grid."""
    if rank <= prefix:
        raise UserError(f"rank={rank} is too small: each of the {prefix} prefix tokens needs one, and the patches some")
    count = rank - prefix
    cell = torch.tensor(cells(height, width, count))
    member = F.one_hot(cell, count).T.double()
    size = member.sum(1, keepdim=True)
    place = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1).reshape(-1, 2)
    centre = member @ place.double() / size
    spread = (height * width / count) ** 0.5 / 2
    bump = torch.softmax(-torch.cdist(centre, place.double()).square() / (2 * spread**2), dim=0)
    eye = torch.eye(prefix, dtype=torch.double)
    share = count / (height * width) / density(height * width)
    return (torch.block_diag(eye, member / size).float(), torch.block_diag(eye, bump).mul(share).float())


def density(patches: int) -> float:
    """The scale of an attention map relative to 14 × 14 patches: a map over more patches has smaller values."""
    return min(1.0, _PATCHES / patches)


def resample(rows: Tensor, old: tuple[int, int], new: tuple[int, int], *, keep_sums: bool) -> Tensor:
    """Resample rows [R, N] over the tokens of one grid to those of another, each row as an image. The prefix is copied.

    Rows that average keep their sum (`keep_sums`); rows of weights keep their values.
    """
    if old == new:
        return rows
    patches = old[0] * old[1]
    prefix, image = rows[:, :-patches], rows[:, -patches:].float()
    moved = F.interpolate(image.unflatten(-1, old)[None], new, mode="bicubic", antialias=True)[0].flatten(1)
    if keep_sums:
        moved = moved * (patches / moved.shape[1])
        moved = moved + (image.sum(1, keepdim=True) - moved.sum(1, keepdim=True)) / moved.shape[1]
    return torch.cat([prefix, moved.to(rows.dtype)], dim=1)


@dataclasses.dataclass(frozen=True)
class Rest:
    """The keys that a query did not choose, as R averages, each weighted by the number of tokens it represents.

    `average` [R, N] gives the averages of keys and values; `share` [N, R] gives the number of tokens that each token
    adds to each average. Both are [B, 1, …] if every image has its own.
    """

    average: Tensor
    share: Tensor

    def mass(self, chosen: Tensor) -> Tensor:
        """The number of tokens that each average represents without the chosen tokens: [B, H, N, R]."""
        whole = self.share.sum(-2, keepdim=True)
        left = whole - chosen.to(self.share.dtype) @ self.share
        return left.where(left > 1e-4 * whole, 0)

    def tail(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The input of the kernel: the scores of the averages for every query [B, H, N, R], their values, shares."""
        return scale * q @ (self.average @ k).transpose(-2, -1), self.average @ v, self.share


def rest(height: int, width: int, prefix: int, rank: int, like: Tensor) -> Rest:
    """Averages over the cells of a grid, with the dtype and device of a tensor."""
    made = _rest if torch.compiler.is_compiling() else _cached
    found = made(height, width, prefix, rank)
    return Rest(found.average.to(like), found.share.to(like))


def _rest(height: int, width: int, prefix: int, rank: int) -> Rest:
    down, _ = pooling(height, width, prefix, rank)
    return Rest(down, (down > 0).T.to(down.dtype).contiguous())


@lru_cache(maxsize=64)
def _cached(height: int, width: int, prefix: int, rank: int) -> Rest:
    # The first call may run in inference mode or under the meta device; the cached tensors must serve every call.
    with torch.inference_mode(False), torch.device("cpu"):
        return _rest(height, width, prefix, rank)
