"""How many tokens each layer should merge: schedules from none to many, found one small step at a time.

1. What tokens cost is measured: a block's milliseconds for a few numbers of them, with merging and without.
2. From no merging on, each step merges a few more tokens in one layer: in the one where that harms the answers least
   for the milliseconds it saves. Harm is the divergence KL(dense ‖ merged) on a few images.
3. Steps get dearer as more is merged, so what one cost when last seen is about the least it can cost now: only the
   layer that looks cheapest is tried again, until it still does afterwards.

Where tokens are merged matters as much as how many: the first layers save the most and harm the most, and what is
merged after the last attention harms nothing at all.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Context, Grid
from ..backbones import is_host
from ..backbones.cost import Layer
from ..errors import UserError
from ..tokens import NONE, create_reducers, parse_tokens
from .clock import race
from .judge import divergence, logits, losses
from .notes import Notes
from .search import Progress

#: The reducer whose schedules are searched; with options, it is taken as it is.
SEARCHED = "tome"
#: How much the class token's attention may keep a patch from being merged (see `tome`).
PROTECTIONS = (0.0, 0.05, 0.1, 0.2)
#: A step merges one in so many of the patches that a layer has before any merging.
STEP = 20
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


def why_not(host: Any, tokens: str) -> str:
    """Why a model's tokens cannot be reduced so; nothing if they can."""
    if not is_host(host):
        return f"{type(host).__name__} keeps timm's own layers, which need every token"
    if host.tokens:
        return f"its tokens are reduced already, by {host.tokens}"
    try:
        host.set_tokens("tome:r=1" if tokens == SEARCHED else tokens)
    except UserError as error:
        return str(error)
    host.set_tokens(NONE)
    return ""


@torch.inference_mode()
def schedules(
    host: Any, tokens: str, images: Tensor, most: float, budget: float, notes: Notes, progress: Progress
) -> list[Schedule]:
    """The model as it is, and then what `tokens` asks for: of `tome`, schedules from few tokens to many, each quicker
    than the one before by what blocks take, until one is expected to lose more than `most` points; of any other spec,
    that one."""
    cost = Cost(notes.get("milliseconds by tokens", partial(block_times, host, images[:1], budget, progress)))
    tried = _Trials(host, images, cost, notes)
    if tokens != SEARCHED:
        return [tried.plain, tried.judged(tried.priced(tokens))]
    with progress("searching what to merge: % of the blocks' time saved", 100) as step:
        tried.choose_protection()
        path, shown = [tried.plain], 0
        for found in climb(tried):
            path.append(found)
            saved = int(100 * (1 - found.ms / tried.plain.ms))
            step(max(0, saved - shown))
            shown = max(shown, saved)
            if found.loss > most:
                break
    return path


class _Trials:
    """What any schedule costs, and what it harms."""

    def __init__(self, host: Any, images: Tensor, cost: Cost, notes: Notes) -> None:
        self.host, self.images, self.cost, self.notes = host, images, cost, notes
        self.dense = logits(host, images, "the model")
        patches = [row.grid.patches for row in _rows(host)]
        self.steps = [max(1, n // STEP) for n in patches]
        self.middle = [n // 12 if i >= len(patches) // 6 else 0 for i, n in enumerate(patches)]
        self.plain = Schedule((0,) * len(patches), "", cost(host))
        self.protect = 0.0

    def choose_protection(self) -> None:
        """How much to protect what the class token looks at: what harms least under one schedule from the middle."""
        found = {}
        for self.protect in PROTECTIONS:
            try:
                found[self.protect] = self.judged(self.merging(self.middle)).harm
            except UserError:  # an attention that cannot say what the class token looks at
                continue
        self.protect = min(found, key=lambda protect: found[protect])

    def merging(self, r: Sequence[int]) -> Schedule:
        """The schedule that merges so many in each layer, or as many as there are partners for, with its cost."""
        found = self.priced(self._text(r))
        return dataclasses.replace(found, tokens=self._text(found.r))

    def priced(self, tokens: str) -> Schedule:
        """What `tokens` asks for, with its cost."""
        try:
            self.host.set_tokens(tokens)
            blocks = zip(_rows(self.host), self.host.blocks, strict=True)
            gone = tuple(row.grid.patches - block.grid_after(row.grid).patches for row, block in blocks)
            return Schedule(gone, tokens, self.cost(self.host))
        finally:
            self.host.set_tokens(NONE)

    def judged(self, schedule: Schedule) -> Schedule:
        """The schedule with its harm."""
        found = self.notes.get(f"harm of {schedule.tokens}", partial(self._harm, schedule.tokens))
        return dataclasses.replace(schedule, harm=found[0], loss=found[1])

    def _harm(self, tokens: str) -> tuple[float, float]:
        try:
            self.host.set_tokens(tokens)
            changed = logits(self.host, self.images, tokens)
        finally:
            self.host.set_tokens(NONE)
        return divergence(self.dense, changed), 100 * float(losses(self.dense, changed.argmax(-1)).mean())

    def _text(self, r: Sequence[int]) -> str:
        protect = f",protect={self.protect:g}" if self.protect else ""
        return str(parse_tokens("tome:r=" + "/".join(map(str, r)) + protect))


def climb(tried: Any) -> Iterator[Schedule]:
    """One schedule after the other, each with a step more in the layer where that is cheapest for what it saves."""
    now = tried.plain
    prices = dict.fromkeys(range(len(now.r)), 0.0)
    while prices:
        found: dict[int, Schedule] = {}
        while prices and (layer := min(prices, key=lambda i: prices[i])) not in found:
            more = _quicker(tried, now, layer)
            if more is None:
                del prices[layer]
                continue
            found[layer] = more = tried.judged(more)
            prices[layer] = max(more.harm - now.harm, 0.0) / (now.ms - more.ms)
        if prices:
            now = found[layer]
            yield now


def _quicker(tried: Any, now: Schedule, layer: int) -> Schedule | None:
    """One step more in a layer, or as many as make up for what choosing tokens takes there; None if none do."""
    for steps in (1, 2, 4, 8):
        r = list(now.r)
        r[layer] += steps * tried.steps[layer]
        found = tried.merging(r)
        if found.ms < now.ms:
            return found
    return None


# What it costs -------------------------------------------------------------------------------------------------------


class Cost:
    """Milliseconds of a host's blocks with the tokens that are left in each, by what was measured of blocks.

    Attention runs on the tokens that enter a block and the MLP on those that leave it, so a block costs the mean of
    what it costs with either, and what merging adds.
    """

    def __init__(self, measured: dict[str, Any]) -> None:
        self.measured = measured
        self.fits = {
            kind: np.polyfit(found["patches"], found["ms"], min(2, len(found["ms"]) - 1))
            for kind, found in measured.items()
        }

    def __call__(self, host: Any) -> float:
        total = 0.0
        for row, block in zip(_rows(host), host.blocks, strict=True):
            kind, before, after = _kind(row), row.grid.patches, block.grid_after(row.grid).patches
            total += float(np.polyval(self.fits[kind], [before, after]).mean())
            if after < before:
                total += float(np.interp(before, self.measured[kind]["merging"], self.measured[kind]["added"]))
        return total


@torch.inference_mode()
def block_times(host: Any, image: Tensor, budget: float, progress: Progress) -> dict[str, Any]:
    """Of each kind of block: its milliseconds with so many patches, and what merging adds to them."""
    rows = _rows(host)
    kinds = {_kind(row): i for i, row in enumerate(rows)}
    measured = {}
    with progress("timing blocks by their tokens", len(kinds)) as step:
        for kind, i in kinds.items():
            block, grid = host.blocks[i], rows[i].grid
            spec = parse_tokens("tome:r=1")
            assert spec is not None
            merging = copy.copy(block)
            merging._modules = dict(block._modules)
            merging.reducer = create_reducers(spec, block.attn.dim, block.attn.head_dim, len(rows))[i]
            plain, fewer = (sorted({max(2, round(s * grid.patches)) for s in part}) for part in (_SHARES, _MERGING))
            calls = {f"plain {n}": partial(block, *_given(block, grid, n, image)) for n in plain}
            calls |= {f"merging {n}": partial(merging, *_given(block, grid, n, image)) for n in fewer}
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
    """Something for a block to run on: so many patches of the grid. What it is does not matter to the clock."""
    if patches < grid.patches:
        cells = torch.arange(patches, device=like.device)[None]
        grid = Grid(grid.height, grid.width, grid.prefix, cells=cells, sizes=like.new_ones(1, patches))
    noise = torch.randn(1, grid.tokens, block.attn.dim, generator=torch.Generator().manual_seed(0))
    return noise.to(like), Context(grid)


def _rows(host: Any) -> list[Layer]:
    """What each block costs, and the grid that enters it."""
    return [row for row in host.costs() if row.spec is not None]


def _kind(row: Layer) -> str:
    """Blocks of one kind take the same time: of one stage, with the same attention."""
    return f"{row.name.rpartition('blocks.')[0]}{row.spec}"
