"""The clock's statistics, on clocks whose every tick is known; real clocks belong to benchmarks/planted.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from attendless.measure import clock
from attendless.measure.clock import (
    ROUNDS,
    Comparison,
    compare,
    device_timer,
    interleave,
    sign_rank,
    warm_up,
)
from attendless.measure.throughput import best_batch


class Machine:
    """A simulated machine: contestants say how long they take, and the machine disturbs them."""

    def __init__(self, disturb: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self.disturb, self.order = 0.0, disturb, []

    def contestant(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.order.append(name)
            self.now += seconds * self.disturb(self.now)

        return call

    def timer(self, call: Callable[[], object]) -> float:
        before = self.now
        call()
        return self.now - before

    def interleave(self, seed: int = 0, budget: float = 10.0, **seconds: float) -> Comparison:
        """Time the variants alternately; the last is compared with the first."""
        calls = {name: self.contestant(name, value) for name, value in seconds.items()}
        found = interleave(calls, timer=self.timer, budget=budget, seed=seed)
        first, *_, last = seconds
        return found.compare(last, first)


def noisy(seed: int, spread: float = 0.15, stall: float = 0.1) -> Callable[[float], float]:
    """Jitter of every call, a stall of up to three times now and then, and a speed that wanders by a third."""
    draw = random.Random(seed)

    def disturb(now: float) -> float:
        factor = (1 + draw.uniform(0, spread)) * (1 + math.sin(now) / 3)
        return factor * draw.uniform(1, 3) if draw.random() < stall else factor

    return disturb


def test_an_undisturbed_race_gives_the_exact_ratio() -> None:
    found = Machine().interleave(dense=0.03, ours=0.02)
    assert found.ratio == pytest.approx(1.5)
    assert found.spread == pytest.approx(0, abs=1e-9)
    assert found.distinguishable
    assert found.pairs == ROUNDS  # nothing more to learn


def test_planted_slowdown_is_called_and_equal_contestants_are_not() -> None:
    slow = [Machine(noisy(seed)).interleave(seed, dense=0.02, ours=0.024) for seed in range(20)]
    equal = [Machine(noisy(seed)).interleave(seed, dense=0.02, ours=0.02) for seed in range(20)]
    assert sum(c.distinguishable for c in slow) >= 19
    assert sum(c.distinguishable for c in equal) <= 1
    assert all(c.ratio == pytest.approx(1 / 1.2, rel=0.06) for c in slow)


def test_drift_favours_nobody() -> None:
    """A machine that gets slower and slower: whoever always went second would look slower."""
    found = Machine(lambda now: 1 + now / 5).interleave(dense=0.02, ours=0.02)
    assert found.ratio == pytest.approx(1, abs=0.005)
    assert not found.distinguishable


def test_every_round_gives_everybody_the_same_turns_in_changing_order() -> None:
    machine = Machine()
    names = ["dense", "a", "b"]
    interleave({name: machine.contestant(name, 1.0) for name in names}, timer=machine.timer, budget=75)
    laps = machine.order[4 * len(names) :]  # after the warm-up, one turn a round: the budget is too small for more
    rounds = [tuple(laps[i : i + 3]) for i in range(0, len(laps), 3)]
    assert len(rounds) == ROUNDS
    assert all(sorted(r) == sorted(names) for r in rounds)
    assert len(set(rounds)) > 3


@pytest.mark.parametrize(
    ("budget", "pairs", "calls"), [(1, 1, 6), (40, 5, 18), (90, 10, 28)], ids=["one round", "too few", "enough"]
)
def test_a_slow_contestant_keeps_within_the_budget(budget: float, pairs: int, calls: int) -> None:
    """Two to four calls of each to warm up, and no round begins after the budget is over."""
    machine = Machine()
    found = machine.interleave(budget=budget, dense=5.0, ours=4.0)
    assert found.pairs == pairs
    assert len(machine.order) == calls
    assert found.ratio == pytest.approx(1.25)
    # Few ratios that agree perfectly are still few.
    assert found.enough is (pairs >= 8)
    assert found.distinguishable is (pairs >= 8)
    if not found.enough:
        assert found.interval == (0, math.inf)


def test_a_quick_contestant_stays_within_budget() -> None:
    machine = Machine(noisy(0, spread=0.05))
    machine.interleave(budget=10, dense=0.02, ours=0.02)
    assert machine.now < 12


def test_scattering_ratios_get_longer_rounds_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(noisy(0, spread=3.0))
    found = machine.interleave(budget=30, dense=0.02, ours=0.03)
    assert found.pairs >= ROUNDS // 2
    assert 20 < machine.now < 33
    monkeypatch.setattr(clock, "NOISY", math.inf)
    assert found.spread < 0.75 * Machine(noisy(0, spread=3.0)).interleave(budget=30, dense=0.02, ours=0.03).spread


def test_quick_calls_are_repeated_within_a_turn_and_reported_per_call() -> None:
    machine = Machine()
    found = interleave({"quick": machine.contestant("quick", 1e-5)}, timer=machine.timer, budget=1)
    assert found.median("quick") == pytest.approx(1e-5)
    assert len(machine.order) > 100 * ROUNDS


@pytest.mark.parametrize(
    ("ratio", "quartiles", "interval", "seen"),
    [
        (1.30, (1.25, 1.35), (1.28, 1.32), True),
        (0.80, (0.75, 0.85), (0.78, 0.82), True),
        (1.01, (1.00, 1.02), (1.005, 1.015), False),  # certain, but smaller than its spread
        (1.30, (1.20, 1.40), (0.90, 1.60), False),  # larger than its spread, but too few pairs to be certain
        (1.30, (1.00, 1.60), (1.10, 1.50), False),
    ],
)
def test_a_difference_must_be_certain_and_exceed_its_spread(
    ratio: float, quartiles: tuple[float, float], interval: tuple[float, float], seen: bool
) -> None:
    assert Comparison(ratio, quartiles, interval, 100).distinguishable is seen


def test_compare_is_the_median_of_paired_ratios() -> None:
    found = compare([1, 2, 4, 5], [2, 2, 6, 20])  # ratios 2, 1, 1.5, 4
    assert found.ratio == pytest.approx(1.75)
    assert found.quartiles == pytest.approx((1.375, 2.5))
    assert found.interval == (0, math.inf)  # four pairs prove nothing
    assert not found.distinguishable


@pytest.mark.parametrize("n", [8, 25, 100])
def test_sign_interval_covers_the_median(n: int) -> None:
    """Against simulation: the interval misses the true median as seldom as promised, and one rank more would not."""
    draw, k = random.Random(n), sign_rank(n, 0.9)
    samples = [sorted(draw.expovariate(1) for _ in range(n)) for _ in range(4000)]

    def covered(k: int) -> float:
        return sum(s[k - 1] <= math.log(2) <= s[-k] for s in samples) / len(samples)

    assert covered(k) >= 0.9 - 0.015
    assert covered(k + 1) < 0.9 + 0.015


def test_warm_up_waits_until_calls_stop_getting_quicker() -> None:
    times = iter([9.0, 8.0, 4.0, 3.0, 1.0, 1.0, 1.01, 0.99, *[0.5] * 9])
    made: list[float] = []

    def timer(call: Callable[[], object]) -> float:
        made.append(next(times))
        return made[-1]

    assert warm_up(lambda: None, timer) == 0.99
    assert made[-1] == 0.99


def test_warm_up_keeps_within_its_limit_but_forgives_the_first_call() -> None:
    """Compilation is not held against a call; a second slow one is."""
    for times, made in (([60.0, 1.0, 1.0, 1.0, 0.0], 4), ([60.0, 9.0, 0.0], 2), ([3.0, 3.0, 3.0, 0.0], 3)):
        left = iter(times)
        warm_up(lambda: None, lambda call, left=left: next(left), limit=5)
        assert len(list(left)) == len(times) - made


def test_best_batch_keeps_within_its_budget() -> None:
    machine = Machine()
    batch, rate = best_batch(lambda b: machine.contestant(str(b), 10.0 * b), machine.timer, budget=1)
    assert (batch, rate) == (1, pytest.approx(0.1))
    assert machine.order == ["1"] * 3


def test_best_batch_stops_at_the_plateau() -> None:
    machine = Machine()
    # A fixed cost of 8 ms and 1 ms an image, until the cache is full at 16 and images cost more.
    found = best_batch(lambda b: machine.contestant(str(b), 0.008 + 0.001 * b * (1 if b <= 16 else 2)), machine.timer)
    assert found == (16, pytest.approx(16 / 0.024))
    assert "128" not in machine.order


def test_best_batch_keeps_within_limit_and_memory() -> None:
    machine = Machine()

    def forward(batch: int) -> Callable[[], None]:
        if batch > 8:
            raise torch.OutOfMemoryError("no")
        return machine.contestant(str(batch), 0.01)

    assert best_batch(forward, machine.timer)[0] == 8
    assert best_batch(forward, machine.timer, limit=4)[0] == 4


def test_the_cpu_timer_measures_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: 100 + machine.now)
    assert device_timer("cpu")(machine.contestant("a", 2.5)) == 2.5
    assert machine.order == ["a"], "called once"
