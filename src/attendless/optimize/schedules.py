"""How many tokens each layer should merge: schedules from none to many, found by trying and changing the best.

1. What tokens cost is measured: a block's milliseconds for a few numbers of them, with merging and without. So what any
   schedule takes is known without running it.
2. What a schedule harms is measured: the divergence KL(dense ‖ merged) of the answers to a few images.
3. Plain schedules begin: so many tokens in every layer, every second, every fourth, from some layer on. Of all that was
   tried, those that nothing beats in both are changed: tokens move from one layer to another, come or go.

Where tokens are merged matters as much as how many. The first layers save the most and harm the most; and where
choosing tokens is slow, a few layers that merge many are better than many that merge few.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Context, Grid
from ..backbones import is_backbone
from ..backbones.cost import Layer
from ..errors import UserError
from ..measure.clock import race
from ..tokens import NONE, create_reducers, parse_tokens
from .judge import divergence, logits, losses
from .resume_log import Notes
from .search import Progress, batch_of

#: The reducer whose schedules are searched; with options, it is taken as it is.
SEARCHED = "tome"
#: How much the class token's attention may keep a patch from being merged (see `tome`).
PROTECTIONS = (0.0, 0.05, 0.1, 0.2)
#: How many changes are tried.
TRIALS = 96
#: Plain schedules merge in every layer, or in every so many, between two shares of the depth, a share of the tokens.
_SPANS = ((1 / 12, 3 / 4), (1 / 6, 11 / 12), (1 / 3, 11 / 12))
_EVERY, _GONE = (1, 2, 4), (0.45, 0.65, 0.8)
#: A change is one in so many of the patches that a layer has before any merging, or a few times that.
_STEP = 40
#: Shares of its patches for which a block is timed, and for which it is timed while it merges.
_SHARES, _MERGING = (1.0, 0.7, 0.45, 0.25), (1.0, 0.45)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How many tokens each layer merges, in words that `convert` takes (none: empty); the milliseconds all blocks
    should then take; and on the images of the search the harm, in nats, and the expected loss, in points."""

    r: tuple[int, ...]
    tokens: str
    ms: float
    harm: float = 0.0
    loss: float = 0.0


def why_not(backbone: Any, tokens: str) -> str:
    """Why a model's tokens cannot be reduced so; nothing if they can."""
    if not is_backbone(backbone):
        return f"{type(backbone).__name__} keeps timm's own layers, which need every token"
    if backbone.tokens:
        return f"its tokens are reduced already, by {backbone.tokens}"
    try:
        backbone.set_tokens("tome:r=1" if tokens == SEARCHED else tokens)
    except UserError as error:
        return str(error)
    backbone.set_tokens(NONE)
    return ""


@torch.inference_mode()
def schedules(
    backbone: Any, tokens: str, images: Tensor, most: float, batch: int, budget: float, notes: Notes, progress: Progress
) -> list[Schedule]:
    """The model as it is, and then what `tokens` asks for: of `tome`, schedules from few tokens to many, each quicker
    than the one before by what blocks take, none expected to lose more than `most` points; of any other spec, that
    one."""
    timed = partial(block_times, backbone, batch_of(images, batch), budget, progress)
    cost = Cost(notes.get(f"milliseconds by tokens, batch {batch}", timed))
    before = backbone.use_tail(True)  # as `convert` does with reduced tokens
    try:
        tried = _Trials(backbone, images, cost, notes)
        if tokens != SEARCHED:
            return [tried.plain, tried.judged(tried.priced(tokens))]
        with progress("searching what to merge", len(PROTECTIONS) + TRIALS) as step:
            for protect in PROTECTIONS:
                tried.try_protection(protect)
                step(1)
            return evolve(tried, most, TRIALS, step)
    finally:
        backbone.use_tail(before)


class _Trials:
    """What any schedule costs, and what it harms."""

    def __init__(self, backbone: Any, images: Tensor, cost: Cost, notes: Notes) -> None:
        self.backbone, self.images, self.cost, self.notes = backbone, images, cost, notes
        self.dense = logits(backbone, images, "the model")
        self.patches = [row.grid.patches for row in _rows(backbone)]
        self.plain = Schedule((0,) * len(self.patches), "", cost(backbone))
        self.protect, self.least = 0.0, math.inf

    def try_protection(self, protect: float) -> None:
        """From now on protect so what the class token looks at, if a schedule from the middle harms less for it."""
        before, self.protect = self.protect, protect
        try:
            harm = self.judged(self.merging(_plain(self.patches, _SPANS[1], 1, _GONE[1]))).harm
        except UserError:  # an attention that cannot say what the class token looks at
            harm = math.inf
        if harm < self.least:
            self.least = harm
        else:
            self.protect = before

    def merging(self, r: Sequence[int]) -> Schedule:
        """The schedule that merges so many in each layer, or as many as there are partners for, with its cost."""
        found = self.priced(self._text(r))
        return dataclasses.replace(found, tokens=self._text(found.r))

    def priced(self, tokens: str) -> Schedule:
        """What `tokens` asks for, with its cost."""
        try:
            self.backbone.set_tokens(tokens)
            gone = tuple(
                row.grid.patches - _leaving(self.backbone, i, row) for i, row in enumerate(_rows(self.backbone))
            )
            return Schedule(gone, tokens, self.cost(self.backbone))
        finally:
            self.backbone.set_tokens(NONE)

    def judged(self, schedule: Schedule) -> Schedule:
        """The schedule with its harm."""
        found = self.notes.get(f"harm of {schedule.tokens}", partial(self._harm, schedule.tokens))
        return dataclasses.replace(schedule, harm=found[0], loss=found[1])

    def _harm(self, tokens: str) -> tuple[float, float]:
        try:
            self.backbone.set_tokens(tokens)
            changed = logits(self.backbone, self.images, tokens)
        finally:
            self.backbone.set_tokens(NONE)
        return divergence(self.dense, changed), 100 * float(losses(self.dense, changed.argmax(-1)).mean())

    def _text(self, r: Sequence[int]) -> str:
        protect = f",protect={self.protect:g}" if self.protect else ""
        return str(parse_tokens("tome:r=" + "/".join(map(str, r)) + protect))


def evolve(tried: Any, most: float, trials: int, step: Callable[[int], None]) -> list[Schedule]:
    """What nothing beats in both milliseconds and harm, of all that was tried, the slowest first: the model as it is,
    plain schedules, and changes of the best; none expected to lose more than `most` points."""
    draw, seen, front = random.Random(0), {tried.plain.r}, list[Schedule]()
    waiting = [_plain(tried.patches, *which) for which in itertools.product(_SPANS, _EVERY, _GONE)]
    for _ in range(trials):
        for _ in range(100):  # a change may give what was seen before, or what is slower than the model as it is
            parent = draw.choice([tried.plain, *front])
            r = waiting.pop(0) if waiting else _changed(parent.r, tried.patches, draw)
            found = tried.merging(r)
            if found.r not in seen and found.ms < tried.plain.ms:
                break
        else:
            break
        seen.add(found.r)
        found = tried.judged(found)
        if found.loss <= most and not any(one.ms <= found.ms and one.harm <= found.harm for one in front):
            front = [one for one in front if one.ms < found.ms or one.harm < found.harm] + [found]
        step(1)
    return [tried.plain, *sorted(front, key=lambda one: -one.ms)]


def _plain(patches: Sequence[int], span: tuple[float, float], every: int, share: float) -> list[int]:
    """A share of the patches merged, evenly, in every so many layers between two shares of the depth; never in the
    last, behind which there is nothing to save."""
    first, end = (round(part * len(patches)) for part in span)
    first = min(first, max(0, len(patches) - 2))
    layers = range(first, max(first + 1, min(end, len(patches) - 1)), every)
    return [round(share * n / len(layers)) if i in layers else 0 for i, n in enumerate(patches)]


def _changed(r: Sequence[int], patches: Sequence[int], draw: random.Random) -> list[int]:
    """Some tokens moved from one layer to another, or merged more, or fewer."""
    found = list(r)
    giver, taker = draw.randrange(len(r)), draw.randrange(len(r))
    some = draw.choice([1, 2, 4, 8]) * max(1, patches[giver] // _STEP)
    amount = draw.choice([some, found[giver]]) if found[giver] else some
    what = draw.choice(["move", "move", "more", "fewer"])
    if what != "more":
        amount = min(amount, found[giver])
        found[giver] -= amount
    if what != "fewer":
        found[taker] += amount
    return found


# What it costs -------------------------------------------------------------------------------------------------------


class Cost:
    """Milliseconds of a backbone's blocks with the tokens that are left in each, by what was measured of blocks.

    Attention runs on the tokens that enter a block and the MLP on those that leave it, so a block costs the mean of
    what it costs with either, and what merging adds. A class-token-only last block costs its share of
    the whole block's MACs.
    """

    def __init__(self, measured: dict[str, Any]) -> None:
        self.measured = measured
        self.fits = {
            kind: np.polyfit(found["patches"], found["ms"], min(2, len(found["ms"]) - 1))
            for kind, found in measured.items()
        }

    def __call__(self, backbone: Any) -> float:
        total = 0.0
        for i, row in enumerate(_rows(backbone)):
            kind, before, after = _kind(row), row.grid.patches, _leaving(backbone, i, row)
            part = row.macs.total / _whole(backbone.blocks[i], row.grid) if _is_tail(backbone, i) else 1.0
            total += part * float(np.polyval(self.fits[kind], [before, after]).mean())
            if after < before:
                total += float(np.interp(before, self.measured[kind]["merging"], self.measured[kind]["added"]))
        return total


@torch.inference_mode()
def block_times(backbone: Any, images: Tensor, budget: float, progress: Progress) -> dict[str, Any]:
    """Of each kind of block: its milliseconds with so many patches, and what merging adds to them."""
    rows = _rows(backbone)
    kinds = {_kind(row): i for i, row in enumerate(rows)}
    measured = {}
    with progress("timing blocks by their tokens", len(kinds)) as step:
        for kind, i in kinds.items():
            block, grid = backbone.blocks[i], rows[i].grid
            spec = parse_tokens("tome:r=1")
            assert spec is not None
            merging = copy.copy(block)
            merging._modules = dict(block._modules)
            merging.reducer = create_reducers(spec, block.attn.dim, block.attn.head_dim, len(rows))[i]
            plain, fewer = (sorted({max(2, round(s * grid.patches)) for s in part}) for part in (_SHARES, _MERGING))
            calls = {f"plain {n}": partial(block, *_given(block, grid, n, images)) for n in plain}
            calls |= {f"merging {n}": partial(merging, *_given(block, grid, n, images)) for n in fewer}
            raced = race(calls, budget=budget)
            ms = {name: 1e3 * raced.median(name) for name in calls}
            measured[kind] = {
                "patches": plain,
                "ms": [ms[f"plain {n}"] for n in plain],
                "merging": fewer,
                "added": [max(0.0, ms[f"merging {n}"] - ms[f"plain {n}"]) for n in fewer],
            }
            step(1)
    return measured


def _given(block: Any, grid: Grid, patches: int, like: Tensor) -> tuple[Tensor, Context]:
    """Something for a block to run on: so many patches of the grid, of as many images as `like`. What it is does not
    matter to the clock."""
    if patches < grid.patches:
        cells = torch.arange(patches, device=like.device).expand(len(like), -1)
        grid = Grid(grid.height, grid.width, grid.prefix, cells=cells, sizes=like.new_ones(len(like), patches))
    noise = torch.randn(len(like), grid.tokens, block.attn.dim, generator=torch.Generator().manual_seed(0))
    return noise.to(like), Context(grid)


def _rows(backbone: Any) -> list[Layer]:
    """What each block costs, and the grid that enters it."""
    return [row for row in backbone.costs() if row.spec is not None]


def _is_tail(backbone: Any, number: int) -> bool:
    """Whether a block computes for the prefix tokens alone."""
    return backbone.tail is not None and number == len(backbone.blocks) - 1


def _whole(block: Any, grid: Grid) -> int:
    """A block's MACs for all tokens of a grid, none of them merged."""
    return int(block.attn.macs(grid).total + block.mlp_macs(grid))


def _leaving(backbone: Any, number: int, row: Layer) -> int:
    """How many patches there are after a block's reducer: all that entered where none is read, and none is merged."""
    grid = row.grid if _is_tail(backbone, number) else backbone.blocks[number].grid_after(row.grid)
    return int(grid.patches)


def _kind(row: Layer) -> str:
    """Blocks of one kind take the same time: of one stage, with the same attention."""
    return f"{row.name.rpartition('blocks.')[0]}{row.spec}"
