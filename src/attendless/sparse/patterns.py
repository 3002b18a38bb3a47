"""Patterns: which keys each query may see, as plain values that combine with `|`.

The tokens are cut into blocks, and a pattern says for each block of queries which blocks of keys it sees:

    blocks  = grid_blocks(height, width, prefix, side=4)
    pattern = prefix_pattern(blocks) | window_pattern(blocks, 1) | global_pattern(blocks, [1, 16])

A pattern can be read as an N × N mask (`mask`, the reference), as lists of key blocks (`lists`, for the kernels) and as
a count (`edges`). Everything here is NumPy and a pure function of its arguments, so a pattern can be built once per
grid, cached, and used with any device, dtype or compiler.

Shapes: H heads (1 when all share a pattern) · N tokens · G blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The tokens cut into blocks of any size. Block 0 holds the prefix tokens, and is empty when there are none."""

    order: np.ndarray  # [N] the tokens, block after block
    starts: np.ndarray  # [G + 1] where each block begins in `order`; the last entry is N
    places: np.ndarray  # [G - 1, 2] row and column of each block of patches, counted in blocks

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def tokens(self) -> int:
        return len(self.order)

    def __len__(self) -> int:
        return len(self.starts) - 1


def grid_blocks(height: int, width: int, prefix: int, side: int) -> Blocks:
    """Blocks of side × side patches, row by row; those at the right and bottom edge may be partial."""
    row, column = np.divmod(np.arange(height * width), width)
    across = -(-width // side)
    places = np.stack(np.divmod(np.arange(-(-height // side) * across), across), axis=1)
    return _cut(prefix, row // side * across + column // side, places)


def sequence_blocks(tokens: int, prefix: int, size: int) -> Blocks:
    """Blocks of `size` consecutive tokens. The prefix counts: the first block of patches is shorter by its length."""
    numbers = np.arange(-(-tokens // size))
    return _cut(prefix, np.arange(prefix, tokens) // size, np.stack([0 * numbers, numbers], axis=1))


def _cut(prefix: int, block_of: np.ndarray, places: np.ndarray) -> Blocks:
    order = np.concatenate([np.arange(prefix), prefix + np.argsort(block_of, kind="stable")])
    sizes = np.bincount(block_of, minlength=len(places))
    return Blocks(order, np.concatenate([[0, prefix], prefix + np.cumsum(sizes)]), places)


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """`sees[h, i, j]`: in head h, the queries of block i see the keys of block j. bool [H or 1, G, G]."""

    blocks: Blocks
    sees: np.ndarray

    def __or__(self, other: Pattern) -> Pattern:
        if not np.array_equal(self.blocks.order, other.blocks.order) or len(self.blocks) != len(other.blocks):
            raise ValueError(f"patterns of {len(self.blocks)} and {len(other.blocks)} blocks are cut differently")
        return Pattern(self.blocks, self.sees | other.sees)

    def mask(self) -> Tensor:
        """Which keys each query sees: bool [H or 1, N, N]. Quadratic: for tests and figures."""
        block_of = np.empty(self.blocks.tokens, dtype=np.int64)
        block_of[self.blocks.order] = np.repeat(np.arange(len(self.blocks)), self.blocks.sizes)
        return torch.from_numpy(self.sees[:, block_of[:, None], block_of[None, :]])

    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """The key blocks of each block of queries, as concatenated lists, head by head.

        List number i = head · G + block is `keys[starts[i] : starts[i + 1]]`.
        """
        starts = np.concatenate([[0], np.cumsum(self.sees.sum(axis=2))])
        return starts, np.nonzero(self.sees)[2]

    def edges(self, heads: int) -> int:
        """The number of pairs of a query and a visible key, over `heads` heads."""
        sizes = self.blocks.sizes
        return int((sizes @ self.sees @ sizes).sum()) * (heads // len(self.sees))


# Elementary patterns -------------------------------------------------------------------------------------------------


def no_pattern(blocks: Blocks) -> Pattern:
    """The empty pattern."""
    return Pattern(blocks, np.zeros((1, len(blocks), len(blocks)), dtype=bool))


def global_pattern(blocks: Blocks, which: Sequence[int] | np.ndarray) -> Pattern:
    """The blocks `which` see every block and are seen by every block."""
    pattern = no_pattern(blocks)
    pattern.sees[:, which, :] = True
    pattern.sees[:, :, which] = True
    return pattern


def prefix_pattern(blocks: Blocks) -> Pattern:
    """Prefix tokens see every token and are seen by every token."""
    return global_pattern(blocks, [0])


def window_pattern(blocks: Blocks, radius: int) -> Pattern:
    """A block sees itself and its neighbours up to `radius` blocks away, diagonals included."""
    pattern = no_pattern(blocks)
    apart = np.abs(blocks.places[:, None] - blocks.places[None, :]).max(axis=2)
    pattern.sees[:, 1:, 1:] = apart <= radius
    return pattern


def axial_pattern(height: int, width: int, prefix: int) -> Pattern:
    """A patch sees the patches of its row and of its column. Each patch is one block."""
    blocks = grid_blocks(height, width, prefix, side=1)
    pattern = no_pattern(blocks)
    pattern.sees[:, 1:, 1:] = (blocks.places[:, None] == blocks.places[None, :]).any(axis=2)
    return pattern | prefix_pattern(blocks)


def random_pattern(blocks: Blocks, allowed: np.ndarray, count: int, heads: int, seed: int) -> Pattern:
    """Each block of patches sees `count` random blocks among those `allowed`, drawn separately for each head.

    `allowed` is bool [G - 1, G - 1]. If it allows fewer than `count` blocks, all are seen. The draws use NumPy's
    `RandomState`, whose stream is frozen: a seed gives the same blocks with every version and on every machine.
    """
    random = np.random.RandomState(seed)
    sees = np.zeros((heads, len(blocks), len(blocks)), dtype=bool)
    for head in sees[:, 1:, 1:]:
        tickets = np.where(allowed, random.random_sample(allowed.shape), np.inf)
        np.put_along_axis(head, np.argsort(tickets, axis=1)[:, :count], True, axis=1)
        head &= allowed
    return Pattern(blocks, sees)


def spread(blocks: Blocks, count: int) -> list[int]:
    """`count` blocks of patches far apart: the first block, then repeatedly the block farthest from those taken.

    In a sequence: the first, the last, the middle, …; on a grid, opposite corners come first.
    """
    taken: list[int] = []
    distance = np.full(len(blocks.places), np.inf)
    for _ in range(min(count, len(blocks.places))):
        taken.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(blocks.places - blocks.places[taken[-1]], axis=1))
    return [number + 1 for number in taken]
