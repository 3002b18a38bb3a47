"""BigBird: each query attends to a window of neighbours, a few random blocks, and a few global blocks.

    out_i = softmax(q_i K_S(i)ᵀ / √D) V_S(i)        S(i) = window(i) ∪ random(i) ∪ global ∪ prefix

after Zaheer et al., "Big Bird: Transformers for Longer Sequences", and BBViT ("'Sufficient' Attention Is All You Need",
Eq. 1), which takes it to images. Tokens are grouped in blocks, and S is made of whole blocks:

    form=2d   blocks of 4 × 4 patches; the window is every block up to `window` blocks away, diagonals included.
    form=1d   the papers' form: blocks of 10 tokens in a row, prefix counted in, a window of 3 blocks, 3 random ones by
              BigBird's plan, the first and the last block global. 530 tokens: 51,200 of 280,900 pairs.

The plan (`bigbird_plan`) is that of BigBird's code, which requires at least 2·random + 6 blocks; shorter sequences fall
back to full attention there. Here short sequences are served too: a block that the plan offers too few candidates draws
from all other blocks, so that it gets fewer than `random` blocks only if no others are left.

In both forms `window=0`, `random=0` or `globals=0` switches that part off; prefix tokens attend to all tokens, and all
tokens to them. Each head draws its own random blocks among those outside the window and the global blocks. They follow
from a seed that is stored in the state dict. A layer draws its seed when it is created, unless the option `seed` is
set.

BBViT's released code does not switch keys. It switches which blocks of *queries* compute an output, each with the whole
pattern; the other blocks output zeros: `form=1d,gate=W` and so on. R, W and G in its table have this meaning.
"""

from __future__ import annotations

import dataclasses
import operator
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..options import Options, option
from ..sparse import operations
from ..sparse.backend import Case, Choice
from ..sparse.blocks import Plan, fresh_plan, plan
from ..sparse.patterns import (
    Blocks,
    Pattern,
    global_pattern,
    grid_blocks,
    no_pattern,
    prefix_pattern,
    random_pattern,
    sequence_blocks,
    spread,
    window_pattern,
)
from .interface import Attention
from .registry import register
from .values import Context, Grid


@dataclasses.dataclass(frozen=True)
class BigBirdOptions(Options):
    window: int = option(1, "blocks on each side of a block that belong to its window; 0: no window", low=0)
    random: int = option(3, "random key blocks of each block; 0: none", low=0)
    globals: int = option(2, "global blocks, spread over the grid; 0: only the prefix is global", low=0)
    block: int | None = option(None, "patches along a side of a block (2d: 4), or tokens in a block (1d: 10)", low=1)
    form: Literal["2d", "1d"] = option("2d", "blocks of the grid, or of the sequence as in the papers")
    gate: Literal["RWG", "RW", "RG", "WG", "R", "W", "G"] = option(
        "RWG", "1d: query blocks with an output, R the first, W the middle ones, G the last; the others output zeros"
    )
    seed: int | None = option(None, "seed of the random blocks; none: each layer draws a seed", low=0, high=2**32 - 1)

    def __post_init__(self) -> None:
        if not (self.window or self.random or self.globals):
            raise UserError("window, random and globals are all 0: expected at least one of them")
        if self.gate != "RWG" and self.form != "1d":
            raise UserError(f"gate={self.gate} needs form=1d: it switches blocks of the sequence")


# The pattern, a pure function of the grid, the options and the seed --------------------------------------------------


@lru_cache(maxsize=256)
def bigbird_pattern(height: int, width: int, prefix: int, options: BigBirdOptions, heads: int, seed: int) -> Pattern:
    """The keys that each query attends to."""
    tokens = prefix + height * width
    if options.form == "1d":
        blocks = sequence_blocks(tokens, prefix, options.block or 10)
    else:
        blocks = grid_blocks(height, width, prefix, options.block or 4)
    pattern = global_pattern(blocks, spread(blocks, options.globals))
    if options.window:
        pattern |= window_pattern(blocks, options.window)
    if options.random:
        free = ~pattern.sees[0, 1:, 1:]
        if options.form == "1d":
            pattern |= _random_by_plan(blocks, free, options, heads, seed)
        else:
            pattern |= random_pattern(blocks, free, options.random, heads, seed)
    return _gate(pattern | prefix_pattern(blocks), options.gate)


#: Sequence lengths for which BigBird's code uses the plan of its paper's training. (2,048 is not among them.)
TRAINED = (1024, 3072, 4096)


def bigbird_plan(tokens: int, block: int, count: int) -> list[tuple[int, int, int]]:
    """BigBird's plan for random blocks: (first, stop, count) of each range of key blocks to draw from.

    A long sequence draws all of them from its first 2·count + 5 blocks. At the lengths in `TRAINED`, from the first
    1,024 tokens, or from all blocks if these are no more than two blocks.
    """
    blocks = -(-tokens // block)
    if tokens in TRAINED:
        return [(0, 1024 // block if 2 * block < 1024 else blocks, count)]
    if 2 * count + 5 < blocks:
        return [(0, 2 * count + 5, count)]
    if count + 5 < blocks:
        return [(0, count + 5, count // 2), (count + 5, blocks, count - count // 2)]
    return [(0, blocks, count)]


def bigbird_allows(blocks: int, first: int, stop: int, edge: bool) -> np.ndarray:
    """The key blocks of a range that each query block may draw, bool [blocks, blocks].

    BigBird treats the end of every range as the end of the sequence: its last block counts as global (if there is an
    `edge` block), and its second and second-last blocks may not draw each other.
    """
    query, key = np.ogrid[:blocks, :blocks]
    allowed = (key >= first) & (key < stop - edge)
    return allowed & ~((query == 1) & (key == stop - 2)) & ~((query == stop - 2) & (key == 1))


def _random_by_plan(blocks: Blocks, free: np.ndarray, options: BigBirdOptions, heads: int, seed: int) -> Pattern:
    """The random blocks of each block by BigBird's plan, among those that are `free`, bool [G - 1, G - 1]."""
    count, edge, length = options.random, options.globals > 1, len(free)
    stretches = bigbird_plan(blocks.tokens, options.block or 10, count)
    drawn = no_pattern(blocks)
    for number, (first, stop, some) in enumerate(stretches):
        if blocks.tokens in TRAINED:
            # The older plan limits the range at its end only.
            allowed = free & (np.arange(length) < stop)
        else:
            allowed = free & bigbird_allows(length, first, stop, edge)
        drawn |= random_pattern(blocks, allowed, some, heads, (seed + number) % 2**32)
    anywhere = free & bigbird_allows(length, 0, length, edge)
    return drawn | _fill_up(drawn, anywhere, count, (seed + len(stretches)) % 2**32)


def _fill_up(drawn: Pattern, allowed: np.ndarray, count: int, seed: int) -> Pattern:
    """Further blocks for each block that drew fewer than `count`, from those `allowed`, bool [G - 1, G - 1]."""
    have = drawn.sees[:, 1:, 1:]
    left = allowed & ~have
    missing = np.minimum(count - have.sum(axis=2), left.sum(axis=2))
    more = np.zeros_like(drawn.sees)
    if (missing > 0).any():
        tickets = np.where(left, np.random.RandomState(seed).random_sample(left.shape), np.inf)
        rank = tickets.argsort(axis=2).argsort(axis=2)
        more[:, 1:, 1:] = rank < missing[:, :, None]
    return Pattern(drawn.blocks, more)


def _gate(pattern: Pattern, answer: str) -> Pattern:
    """Only some blocks of queries have an output: R the first (with the prefix), W those between, G the last."""
    number = np.arange(len(pattern.blocks))
    first, last = number <= 1, number == number[-1]
    silent = np.zeros(len(number), dtype=bool)
    for letter, rows in (("R", first), ("W", ~first & ~last), ("G", last)):
        if letter not in answer:
            silent |= rows
    return Pattern(pattern.blocks, pattern.sees & ~silent[:, None])


# Compilers treat the plan as a constant of the graph, so its arguments are plain numbers and the frozen options.
@torch.compiler.assume_constant_result
def _fresh_plan(height: int, width: int, prefix: int, options: BigBirdOptions, heads: int, seed: int) -> Plan:
    return fresh_plan(bigbird_pattern(height, width, prefix, options, heads, seed), heads)


@register
class BigBird(Attention):
    name = "bigbird"
    provides = frozenset({"class_attention", "keys"})
    Options = BigBirdOptions
    examples = (
        "bigbird",
        "bigbird:random=1,block=2",
        "bigbird:window=0,globals=0,random=2,block=2",
        "bigbird:random=0,globals=0,block=2",
        "bigbird:window=0,random=0,globals=1,block=3",
        "bigbird:form=1d",
        "bigbird:form=1d,block=4,random=2",
    )
    executes_more = "blocks with fewer keys than their neighbours in a batched product are padded to its longest list"

    seed: Tensor

    def setup(self, factory: dict[str, Any]) -> None:
        seed = self.options.seed
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        self.register_buffer("seed", torch.tensor(seed, device=factory["device"]))
        self._seed = seed

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        # Read here once: a compiled graph cannot read a number from a tensor.
        if not self.seed.is_meta:
            self._seed = int(self.seed)

    def pattern(self, grid: Grid) -> Pattern:
        """The keys that each query of this layer attends to on `grid`."""
        return bigbird_pattern(grid.height, grid.width, grid.prefix, self.options, self.num_heads, self._seed)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        if torch.compiler.is_compiling():
            height, width = operator.index(grid.height), operator.index(grid.width)
            how = _fresh_plan(height, width, grid.prefix, self.options, self.num_heads, self._seed)
        else:
            how = plan(self.pattern(grid), self.num_heads)
        return operations.block(q, k, v, how, scale=self.scale, dropout=self.dropout), context

    @property
    def prefix_is_full(self) -> bool:
        return "R" in self.options.gate and super().prefix_is_full  # without its row part the prefix outputs zeros

    def core_macs(self, grid: Grid) -> int:
        return 2 * self.pattern(grid).edges(self.num_heads) * self.head_dim

    def refuses(self, grid: Grid) -> str | None:
        return "its blocks need every cell of the grid; tokens were dropped or merged" if grid.reduced else None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        found = super().choice(grid, batch)
        pattern = self.pattern(grid)
        share = pattern.edges(self.num_heads) / (self.num_heads * grid.tokens**2)
        what = f"{len(pattern.blocks) - 1} blocks, {share:.0%} of all pairs"
        return Choice(found.backend, f"{what}; {found.reason}")

    def case(self, grid: Grid, batch: int = 1) -> Case:
        return self.case_of("block", plan(self.pattern(grid), self.num_heads), batch)
