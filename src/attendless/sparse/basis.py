"""A few averages that stand for all tokens: pooled cells of the grid, and the smooth bumps they spread back over.

    down [R, N]   each row averages the keys of one cell; a prefix token is a cell of its own
    up   [R, N]   each row says how much a token belongs to one cell: a bump around it, fading into its neighbours

Both are where learned low-rank attention starts from: untrained, `softmax(q (down k)ᵀ) up` already is a blurred
attention map. `Rest` is what such averages are used for when a query looks at a few keys only: learned ones would serve
worse, since what tells keys apart is not what stands for them.

R averages do not have to fill a rectangle: the grid is cut into bands of rows, and each band into its share of cells.

Shapes: B batch · H heads · N tokens, prefix first · R averages · D head width.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError

#: Patches of the grid at which weights and thresholds have the size they are told in: 224 px in patches of 16.
_PATCHES = 14 * 14


def cells(height: int, width: int, count: int) -> list[int]:
    """Cut a grid into `count` cells as square as can be: which cell each patch is in, row by row."""
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
    """`down` and `up` of `rank` averages, both [R, N]. Of a patch, all of `up` sums to the mean share of a cell; above
    14 × 14 patches to what that is there, as if resampled, so that what counts as zero is the same on every grid."""
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
    """How much each of many patches counts for: a map over more of them has smaller numbers, `up` has not."""
    return min(1.0, _PATCHES / patches)


def resample(rows: Tensor, old: tuple[int, int], new: tuple[int, int], *, keep_sums: bool) -> Tensor:
    """Rows [R, N] over the tokens of one grid → over those of another, each as an image; the prefix stays as it is.

    A row that averages keeps its sum; one that tells how much a token belongs keeps its values.
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
    """What stands for the keys a query did not choose: R averages, each as heavy as the tokens it stands for.

    `average` [R, N] gives their keys and values, `share` [N, R] how many tokens of what each token stands for are an
    average's; both [B, 1, …] where every image has its own.
    """

    average: Tensor
    share: Tensor

    def mass(self, chosen: Tensor) -> Tensor:
        """Tokens each average still stands for, once the chosen ones stand for themselves: [B, H, N, R]."""
        whole = self.share.sum(-2, keepdim=True)
        left = whole - chosen.to(self.share.dtype) @ self.share
        return left.where(left > 1e-4 * whole, 0)

    def tail(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """As the kernel reads it: every query's scores of the averages [B, H, N, R], their values, and the shares."""
        return scale * q @ (self.average @ k).transpose(-2, -1), self.average @ v, self.share


def rest(height: int, width: int, prefix: int, rank: int, like: Tensor) -> Rest:
    """Averages over the cells of a grid, with the type and device of a tensor."""
    made = _rest if torch.compiler.is_compiling() else _kept
    found = made(height, width, prefix, rank)
    return Rest(found.average.to(like), found.share.to(like))


def _rest(height: int, width: int, prefix: int, rank: int) -> Rest:
    down, _ = pooling(height, width, prefix, rank)
    return Rest(down, (down > 0).T.to(down.dtype).contiguous())


@lru_cache(maxsize=64)
def _kept(height: int, width: int, prefix: int, rank: int) -> Rest:
    # Whoever asks first may be evaluating, or building a model without memory: what is kept serves others too.
    with torch.inference_mode(False), torch.device("cpu"):
        return _rest(height, width, prefix, rank)
