"""The order in which vision towers hold the tokens of an image, and the way to row-major order and back.

Most towers hold the patches row by row. Others hold them block by block, so that the tokens that are merged later, or
that share a window, follow each other. A function of type `Order` returns these blocks for a grid of patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention import Grid


class Blocks(NamedTuple):
    """Nested blocks of an array of height × width patches: their `sides` (height, width), the largest first.

    Blocks follow each other row by row, and so do the blocks or patches in each of them.
    """

    height: int
    width: int
    sides: tuple[tuple[int, int], ...] = ()


#: Configuration of a tower, height and width of a grid → the blocks in which the tower holds its patches.
Order = Callable[[Any, int, int], Blocks]


def by_rows(config: Any, height: int, width: int) -> Blocks:
    return Blocks(height, width)


def by_merged(config: Any, height: int, width: int) -> Blocks:
    """Blocks of the patches that a language model receives as one token."""
    return Blocks(height, width, ((config.spatial_merge_size,) * 2,))


def by_windows_of_merged(config: Any, height: int, width: int) -> Blocks:
    """Windows, inside which the patches of each merged token follow each other."""
    merge, side = config.spatial_merge_size, window_side(config)
    return Blocks(height, width, ((side, side), (merge, merge)))


def by_divisions(config: Any, height: int, width: int) -> Blocks:
    """`num_windows_side` windows along each side, whatever the size of the image."""
    count = config.num_windows_side
    return Blocks(height, width, ((height // count, width // count),))


def by_swapped_divisions(config: Any, height: int, width: int) -> Blocks:
    """`num_windows` windows along each side. The row-major patches are read as an array of width × height, which is the
    image where both are equal."""
    count = config.num_windows
    return Blocks(width, height, ((width // count, height // count),))


def window_side(config: Any) -> int:
    """The side of a window in patches, for configurations that give it in pixels: whole merged tokens."""
    merge = config.spatial_merge_size
    return int(config.window_size // merge // config.patch_size * merge)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The tokens of one image, or of one frame, in a row of tokens.

    grid: the tokens in row-major order, the prefix first
    order: the position in the segment of each token of the grid; None: the segment is in that order
    """

    grid: Grid
    order: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.grid.tokens

    def row_major(self, x: Tensor) -> Tensor:
        """x [B, H, N, D] as the tower holds it → in the order of the grid."""
        return x if self.order is None else x.index_select(2, self.order.to(x.device))

    def as_held(self, x: Tensor) -> Tensor:
        """x [B, H, N, D] in the order of the grid → as the tower holds it."""
        return x if self.order is None else x.index_select(2, self.order.argsort().to(x.device))


def segment(size: tuple[int, int, int], prefix: int, blocks: Blocks, parts: int = 1) -> Segment:
    """A segment of patches and tokens on no grid, such as class tokens.

    Args:
        size: frames, height and width of the patches.
        prefix: the tokens on no grid in front of each part.
        blocks: the blocks in which each frame is held.
        parts: the number of equal parts of the patches that have such a prefix each.
    """
    grid = Grid(size[1], size[2], prefix * parts, depth=size[0])
    return _in_blocks(grid, blocks, parts) if blocks.sides else Segment(grid)


@torch.compiler.disable
@lru_cache(maxsize=256)
def _in_blocks(grid: Grid, blocks: Blocks, parts: int) -> Segment:
    prefix, frame = grid.prefix // parts, grid.height * grid.width
    held = np.concatenate([_held(blocks) + frame * index for index in range(grid.depth)])
    at, each = np.arange(grid.area), grid.area // parts
    position = np.empty_like(at)
    position[held] = at + prefix * (at // each + 1)
    first = np.arange(parts)[:, None] * (each + prefix) + np.arange(prefix)
    return Segment(grid, torch.from_numpy(np.concatenate([first.ravel(), position])))


def _held(blocks: Blocks) -> np.ndarray:
    """The row-major index of each patch, in the order in which they are held."""
    row, column = np.divmod(np.arange(blocks.height * blocks.width), blocks.width)
    keys = [key for down, across in (*blocks.sides, (1, 1)) for key in (row // down, column // across)]
    return np.lexsort(keys[::-1])
