"""Schedules from sensitivities: the solver against all schedules, and the damage model against planted ones."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest

from attendless.optimize.schedule_solver import front, solve, time_of, within
from attendless.optimize.schedules import evenly
from attendless.optimize.token_damage import SHARES, DamageModel


def planted(prices: list[float], patches: int = 20, power: float = 1.5, slope: float = 2.0) -> DamageModel:
    """Layers whose damage alone is price · share^slope; the last layer is not measured."""
    measured = tuple(tuple(price * share**slope for share in SHARES) for price in prices)
    return DamageModel((patches,) * (len(prices) + 1), measured, power=power)


def by_tokens(overhead: float = 0.0):
    return lambda before, after: 0.1 * (before + after) + np.where(after < before, overhead, 0.0)


def test_damage_alone_follows_the_measured_curve_and_goes_on_beyond_it() -> None:
    model = planted([3.0, 1.0])
    left = np.array([20, 19, 17, 13, 7, 5, 1])
    np.testing.assert_allclose(model.alone(0, left), 3 * (1 - left / 20) ** 2, rtol=1e-9, atol=1e-12)
    assert model.alone(1, 20) == 0


def test_damage_of_a_schedule_is_the_power_mean_of_what_each_layer_adds() -> None:
    model = planted([3.0, 1.0, 2.0], power=1.3)

    def alone(price: float, left: int) -> float:
        return price * (1 - left / 20) ** 2

    added = [alone(3, 18), alone(1, 12) - alone(1, 18), alone(2, 7) - alone(2, 12)]
    assert model((2, 6, 5, 0)) == pytest.approx(sum(m**1.3 for m in added) ** (1 / 1.3))
    assert model((0, 0, 0, 0)) == 0


def test_a_new_stage_begins_with_all_of_its_patches() -> None:
    measured = (tuple(share**2 for share in SHARES),) * 2
    model = DamageModel((16, 8, 8), measured, power=1.0)
    assert model((8, 4, 0)) == pytest.approx(0.25 + 0.25)


@pytest.mark.parametrize("price", [1e-4, 1e-2, 0.05, 0.3])
@pytest.mark.parametrize("overhead", [0.0, 0.5])
def test_the_solver_finds_the_best_of_all_schedules(price: float, overhead: float) -> None:
    model = planted([2.0, 0.4, 0.7], patches=12)
    times = [by_tokens(overhead)] * 4

    def cost(removed: tuple[int, ...]) -> float:
        left, total = 12, 0.0
        for layer, gone in enumerate(removed):
            total += price * float(times[layer](np.array(left), np.array(left - gone)))
            total += float(model.added(layer, left, left - gone)) if layer < 3 else 0.0
            left -= gone
        return total

    every = [(*r, 0) for r in itertools.product(range(12), repeat=3) if sum(r) < 12]
    assert cost(solve(model, times, price)) == pytest.approx(min(map(cost, every)), rel=1e-9)


def test_the_front_goes_from_mild_to_strong() -> None:
    model, times = planted([2.0, 0.4, 0.7, 0.2], patches=40), [by_tokens()] * 5
    found = front(model, times)
    assert len(found) > 10
    assert all(sum(a) <= sum(b) for a, b in pairwise(sorted(found, key=model)))
    assert all(one[-1] == 0 for one in found)
    assert model(found[0]) < 0.01 < 0.3 < model(found[-1])


def test_choosing_that_takes_long_happens_in_few_layers() -> None:
    def layers(overhead: float) -> float:
        model = planted([1.0, 1.0, 1.0, 1.0], patches=40)
        found = [r for r in front(model, [by_tokens(overhead)] * 5) if 10 <= sum(r) <= 30]
        return sum(sum(n > 0 for n in r) for r in found) / len(found)

    assert layers(2.0) < layers(0.0)


def test_the_fit_finds_the_power_and_the_scale_of_measured_schedules() -> None:
    model = planted([2.0, 0.4, 0.7, 0.2], patches=40)
    hidden = planted([2.0, 0.4, 0.7, 0.2], patches=40, power=1.8)
    schedules = [(0, 2, 4, 8, 0), (1, 4, 8, 10, 0), (6, 6, 6, 6, 0), (0, 20, 0, 0, 0)]
    fitted = model.fitted(schedules, [1.2 * hidden(r) for r in schedules])
    assert fitted.slope == pytest.approx(1.0)
    assert fitted.power == pytest.approx(1.8)
    assert fitted.scale == pytest.approx(1.2)
    assert fitted((3, 3, 9, 9, 0)) == pytest.approx(1.2 * hidden((3, 3, 9, 9, 0)))
    steep = model.fitted(schedules, [hidden(r) ** 1.2 for r in schedules])
    assert steep((3, 3, 9, 9, 0)) == pytest.approx(hidden((3, 3, 9, 9, 0)) ** 1.2)
    one = model.fitted(schedules[:1], [0.5])
    assert one.power == model.power
    assert one(schedules[0]) == pytest.approx(0.5)


def test_schedules_are_tried_at_even_steps_of_time() -> None:
    found = [(n,) for n in range(7)]
    assert evenly(found, [10, 9.9, 9.8, 9.7, 7, 4, 1], 4) == [(0,), (4,), (5,), (6,)]
    assert evenly(found[:1], [10], 4) == [(0,)]
    assert evenly([], [], 4) == []


def test_a_schedule_for_a_given_time_takes_no_longer_and_damages_no_more_than_the_front() -> None:
    model, times = planted([2.0, 0.4, 0.7, 0.2], patches=40), [by_tokens()] * 5
    whole = time_of(model, times, (0,) * 5)
    for share in (0.9, 0.75, 0.6):
        found = within(model, times, share * whole)
        assert time_of(model, times, found) <= share * whole
        rivals = [r for r in front(model, times) if time_of(model, times, r) <= share * whole]
        assert model(found) <= 1.001 * min(map(model, rivals))
    assert within(model, times, 2 * whole) == (0,) * 5
