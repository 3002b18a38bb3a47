"""The clock: an interleaved benchmark in one process, judged by paired ratios.

The speed of a machine drifts with temperature, frequency and other processes. Two models timed one after the other meet
two different machines. Two models called alternately, milliseconds apart, meet the same one: the *ratio* of their times
is stable where neither time is. One round calls every variant in a fresh random order and yields one ratio per variant;
the verdict rests on the ratios of many rounds. The process retains freed memory (`malloc`), because which variant pays
for fresh pages is a matter of chance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from .malloc import keep_memory

Call = Callable[[], object]
Timer = Callable[[Call], float]

#: The smallest number of rounds, if the budget allows.
ROUNDS = 25
#: If the ratios scatter by more than this, rounds are made longer.
NOISY = 0.08
#: Confidence of the interval of the median ratio.
CONFIDENCE = 0.99


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The speed-up of one variant over another, over paired rounds."""

    ratio: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    pairs: int

    @property
    def spread(self) -> float:
        """The interquartile range of the paired ratios."""
        return self.quartiles[1] - self.quartiles[0]

    @property
    def enough(self) -> bool:
        """Whether there were enough rounds for a verdict."""
        return enough(self.pairs)

    @property
    def distinguishable(self) -> bool:
        """Whether the difference is significant: the median's interval excludes 1, and the effect exceeds the spread.

        The first condition alone would report a bias of half a percent, given enough rounds; the second alone would
        trust a handful of rounds.
        """
        low, high = self.interval
        return not low <= 1 <= high and abs(self.ratio - 1) > self.spread


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds per call of each variant, one figure per round; figures at the same index are a pair."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return float(np.median(self.seconds[name]))

    def compare(self, name: str, against: str) -> Comparison:
        return compare(self.seconds[name], self.seconds[against])


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """The ratios theirs / ours: more than 1 means that ours is faster."""
    ratios = np.sort(np.asarray(theirs, dtype=float) / np.asarray(ours, dtype=float))
    low, high = np.quantile(ratios, [0.25, 0.75])
    k = sign_rank(len(ratios), CONFIDENCE)
    return Comparison(
        ratio=float(np.median(ratios)),
        quartiles=(float(low), float(high)),
        interval=(float(ratios[k - 1]), float(ratios[-k])) if k else (0.0, math.inf),
        pairs=len(ratios),
    )


def sign_rank(n: int, confidence: float) -> int:
    """The largest k for which the k-th smallest and k-th largest of n values enclose the median with this confidence.

    Each value lies below the median with probability ½, whatever the distribution, so the probability that fewer than k
    do is a binomial tail. 0 if n is too small for any k.
    """
    tail, k = 0.0, 0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        k += 1
    return k


def enough(rounds: int) -> bool:
    """Whether there is an interval for the median of so many ratios: it takes 8."""
    return sign_rank(rounds, CONFIDENCE) > 0


def device_timer(device: torch.device | str = "cpu") -> Timer:
    """Seconds of one call: wall-clock time on a CPU, recorded events on an accelerator, where calls return early."""
    device = torch.device(device)
    if device.type == "cpu":
        return _wall_seconds

    def seconds(call: Call) -> float:
        start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        torch.accelerator.synchronize(device)
        start.record()
        call()
        end.record()
        torch.accelerator.synchronize(device)
        return start.elapsed_time(end) / 1e3

    return seconds


def _wall_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def warm_up(call: Call, timer: Timer, *, window: int = 2, tolerance: float = 0.03, limit: float = 120.0) -> float:
    """Call until it stops getting faster; return the seconds of the fastest call.

    The call is warm when the best of the last `window` calls no longer beats the best before them by more than
    `tolerance`. Lazy initialisation, compilation and a rising clock frequency are over by then. Warming up ends after
    `limit` seconds, not counting the first call, which may compile.
    """
    times: list[float] = []
    while True:
        before = min(times, default=math.inf)
        for _ in range(window):
            times.append(timer(call))
            if sum(times[1:]) > limit:
                return min(times)
        if min(times[-window:]) >= before * (1 - tolerance):
            return min(times)


def interleave(
    variants: Mapping[str, Call],
    *,
    timer: Timer = _wall_seconds,
    budget: float = 10.0,
    rounds: int = ROUNDS,
    max_rounds: int = 1000,
    precision: float = 0.005,
    seed: int = 0,
) -> Timings:
    """Time all variants alternately, for at most `budget` seconds and one round.

    After `rounds` rounds timing also stops when the interval of every median ratio over the first variant is known to
    `precision`. It never stops because a difference shows: optional stopping inflates false positives. In a round each
    variant is timed up to five times, as the budget allows, and the fastest counts, because disturbances only add time.
    If the ratios still scatter, pairs of rounds are joined into longer ones. Warming up takes at most as long again, or
    two calls of each.
    """
    keep_memory()
    names = list(variants)
    fastest = {name: warm_up(variants[name], timer, limit=min(120.0, budget / len(names))) for name in names}
    # A very fast call is repeated until it takes milliseconds, well above the cost of reading the clock.
    repeats = {name: max(1, math.ceil(0.002 / max(fastest[name], 1e-7))) for name in names}
    lap = sum(fastest[name] * repeats[name] for name in names)
    turns = min(5, max(1, int(budget / (rounds * max(lap, 1e-7)))))
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    spent = 0.0
    with _no_collection():
        while True:
            figures = _round(variants, repeats, turns, timer, order)
            spent += sum(map(sum, figures.values()))
            for name, values in figures.items():
                seconds[name].append(min(values) / repeats[name])
            done = len(seconds[names[0]])
            if done < rounds and spent < budget:
                continue
            found = Timings({name: tuple(seconds[name]) for name in names})
            others = [found.compare(name, names[0]) for name in names[1:]]
            if spent >= budget or done >= max_rounds:
                return found
            if any(other.spread > NOISY * other.ratio for other in others):
                seconds = {name: [*map(min, values[::2], values[1::2])] for name, values in seconds.items()}
                turns *= 2
            elif all(_known(other, precision) for other in others):
                return found


def _round(
    variants: Mapping[str, Call], repeats: Mapping[str, int], turns: int, timer: Timer, order: random.Random
) -> dict[str, list[float]]:
    """Seconds of every turn of one round."""
    figures: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(turns):
        # Every second turn reverses the order, so that a steady drift favours no variant.
        names = names[::-1] if turn % 2 else order.sample(names, len(names))
        for name in names:
            figures[name].append(timer(_repeat(variants[name], repeats[name])))
    return figures


def _known(comparison: Comparison, precision: float) -> bool:
    low, high = comparison.interval
    return high - low <= 2 * precision * low


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which would interrupt whichever variant is running."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _repeat(call: Call, times: int) -> Call:
    def calls() -> None:
        for _ in range(times):
            call()

    return call if times == 1 else calls
