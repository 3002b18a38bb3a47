"""The token schedules with the lowest predicted damage for their predicted time, by dynamic programming.

The damage of a schedule is a sum over the layers (to the power 1/p), and so is its time. For a price of a millisecond,

    minimise Σ_l m_l(n_{l−1}, n_l)^p + price · ms_l(n_{l−1}, n_l)

over n_0 ≥ n_1 ≥ … is a shortest path through the numbers of patches that may leave each layer. A sweep of the price
gives schedules from few tokens removed to many, within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .token_damage import DamageModel
from .token_damage import counts as _counts

#: ms(before, after): the milliseconds of a layer that so many patches enter and leave; arrays are allowed.
LayerTime = Callable[[np.ndarray, np.ndarray], np.ndarray]
#: Numbers of patches that a layer may leave, at most, and the smallest share of them.
_STATES, _LEAST = 64, 0.08
#: Prices in the sweep.
_PRICES = 60


def solve(damage: DamageModel, times: Sequence[LayerTime], price: float) -> tuple[int, ...]:
    """The numbers of patches removed in each layer for a price of a millisecond. The last layer removes none."""
    return _path(damage, times, price, [_states(count) for count in damage.patches])


def front(damage: DamageModel, times: Sequence[LayerTime]) -> list[tuple[int, ...]]:
    """The best schedules, from few tokens removed to many, none of them twice."""
    states = [_states(count) for count in damage.patches]
    whole = sum(float(time(np.array(n), np.array(n))) for time, n in zip(times, damage.patches, strict=True))
    # Prices from a thousandth of the mildest damage for the whole time to many times the strongest.
    low = min(float(damage.added(i, n, 0.95 * n)) for i, n in enumerate(damage.patches[:-1])) / whole
    high = max(float(damage.added(i, n, 0.2 * n)) for i, n in enumerate(damage.patches[:-1])) / whole
    prices = np.geomspace(max(low, 1e-12) / 10, max(high, 1e-9) * 100, _PRICES)
    found = dict.fromkeys(_path(damage, times, float(price), states) for price in prices)
    return [removed for removed in found if any(removed)]


def within(damage: DamageModel, times: Sequence[LayerTime], ms: float) -> tuple[int, ...]:
    """The schedule with the lowest predicted damage that takes at most `ms` milliseconds, or the fastest there is."""
    states = [_states(count) for count in damage.patches]
    low, high = -12.0, 12.0  # logarithms of the price; time falls as it rises
    for _ in range(40):
        middle = (low + high) / 2
        slow = time_of(damage, times, _path(damage, times, 10**middle, states)) > ms
        low, high = (middle, high) if slow else (low, middle)
    return _path(damage, times, 10**high, states)


def time_of(damage: DamageModel, times: Sequence[LayerTime], removed: Sequence[int]) -> float:
    """The predicted milliseconds of a schedule."""
    total = 0.0
    for (before, after), time in zip(_counts(damage.patches, removed), times, strict=True):
        total += float(time(np.array(before), np.array(after)))
    return total


def _states(count: int) -> np.ndarray:
    """Numbers of patches that may be left of `count`, ascending; the last is all of them."""
    least = max(1, round(_LEAST * count))
    return np.unique(np.round(np.linspace(least, count, min(_STATES, count - least + 1))).astype(int))


def _path(
    damage: DamageModel, times: Sequence[LayerTime], price: float, states: Sequence[np.ndarray]
) -> tuple[int, ...]:
    last = len(times) - 1
    ahead = price * times[last](states[last], states[last])  # cost from a layer on, by the patches that enter it
    choices = []
    for layer in range(last - 1, -1, -1):
        numbers = states[layer]
        before, after = numbers[:, None], numbers[None, :]
        cost = damage.added(layer, before, after) + price * times[layer](before, after)
        # A new stage begins with all of its patches, whatever the one before left.
        cost = cost + (ahead[None, :] if damage.patches[layer] == damage.patches[layer + 1] else ahead[-1])
        cost = np.where(after <= before, cost, np.inf)
        choices.append(_last_argmin(cost))
        ahead = cost.min(1)
    removed, at = [], len(states[0]) - 1
    for layer, choice in enumerate(reversed(choices)):
        if layer and damage.patches[layer] != damage.patches[layer - 1]:
            at = len(states[layer]) - 1
        removed.append(int(states[layer][at] - states[layer][choice[at]]))
        at = choice[at]
    return (*removed, 0)


def _last_argmin(cost: np.ndarray) -> np.ndarray:
    """The last of the smallest entries of each row: of equal costs, the one that removes least."""
    return cost.shape[1] - 1 - np.argmin(cost[:, ::-1], axis=1)
