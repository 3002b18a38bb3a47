"""Predict how much a token schedule damages the predictions, from what each layer alone does.

`token_sensitivities` measures D_l(n), the divergence KL(baseline ‖ reduced) if layer l alone leaves n patches. In a
schedule that leaves n_0 ≥ n_1 ≥ …, layer l adds the damage of going from n_{l−1} to n_l:

    m_l    = D_l(n_l) − D_l(n_{l−1})
    damage = scale · (Σ m_l^p)^(slope/p)

With p = 1 the damages would add up. They overlap: a patch that an earlier layer merged damages later layers less than
one that a later layer merges anew, so p is above 1. `fitted` takes p, scale and slope from a few measured schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..backbones import Backbone
from .judge import BATCH, logits
from .search import Search
from .sensitivity import States

#: Shares of its patches that a layer removes alone.
SHARES = (0.05, 0.1, 0.2, 0.35, 0.55, 0.75)
#: p before it is fitted, and the values that the fit tries.
_POWER, _POWERS = 1.5, tuple(np.arange(1.0, 2.51, 0.1))
#: Slopes between which the fit stays.
_SLOPES = (0.7, 1.4)
#: Divergences below this are noise of the arithmetic.
_FLOOR = 1e-8


@torch.inference_mode()
def token_sensitivities(
    backbone: Backbone,
    view: Callable[[int, int], Any],
    patches: Sequence[int],
    search: Search,
) -> list[list[float]]:
    """Mean distance of the outputs from the baseline's, for each layer but the last and each of `SHARES`.

    `view(layer, removed)` is the backbone with that many patches removed in that layer alone; `patches` are those that
    enter each layer. The layers before the reduced one run only once.
    """
    chunks = search.images.split(BATCH)
    expected = [logits(backbone, chunk, "the model") for chunk in chunks]
    states = States(backbone, chunks)
    found = []
    with search.progress("measuring token sensitivities", (len(patches) - 1) * len(SHARES)) as step:
        for layer, count in enumerate(patches[:-1]):
            states.advance(layer)
            row = []
            for share in SHARES:
                trial, total = view(layer, round(share * count)), 0.0
                for number, chunk in enumerate(chunks):
                    changed = logits(states.rest(trial, number), chunk, f"tokens in layer {layer}")
                    total += len(chunk) * search.distance(expected[number], changed)
                row.append(total / len(search.images))
                step(1)
            found.append(row)
    return found


def counts(patches: Sequence[int], removed: Sequence[int]) -> list[tuple[int, int]]:
    """The patches that enter and leave each layer. A new stage begins with all of its patches."""
    found, left = list[tuple[int, int]](), 0
    for layer, (count, gone) in enumerate(zip(patches, removed, strict=True)):
        left = left if layer and count == patches[layer - 1] else count
        found.append((left, left - gone))
        left -= gone
    return found


@dataclasses.dataclass(frozen=True)
class DamageModel:
    """Predicts the divergence of a schedule.

    patches: the patches that enter each layer of the unchanged model.
    measured: `token_sensitivities`.
    power, scale, slope: as in the formula above.
    """

    patches: tuple[int, ...]
    measured: tuple[tuple[float, ...], ...]
    power: float = _POWER
    scale: float = 1.0
    slope: float = 1.0

    def alone(self, layer: int, left: Any) -> Any:
        """D_l(n): the divergence if `layer` alone leaves `left` patches, a number or an array.

        Between the measured shares, log D is linear in the log of the removed share; so it is beyond them.
        """
        share = np.clip(1 - np.asarray(left, dtype=float) / self.patches[layer], 0, 1)
        x, y = np.log(SHARES), np.log(np.maximum(np.maximum.accumulate(self.measured[layer]), _FLOOR))
        at = np.log(np.maximum(share, 1e-9))
        below, above = (max(1.0, (y[i + 1] - y[i]) / (x[i + 1] - x[i])) for i in (0, -2))
        inside = np.interp(at, x, y)
        logs = np.where(
            at < x[0], y[0] + below * (at - x[0]), np.where(at > x[-1], y[-1] + above * (at - x[-1]), inside)
        )
        return np.where(share > 0, np.exp(logs), 0.0)

    def added(self, layer: int, before: Any, after: Any) -> Any:
        """m_l^p for a layer that `before` patches enter and `after` leave."""
        return np.maximum(self.alone(layer, after) - self.alone(layer, before), 0.0) ** self.power

    def __call__(self, removed: Sequence[int]) -> float:
        """The predicted divergence of a schedule."""
        pairs = counts(self.patches, removed)[:-1]
        total = sum(float(self.added(layer, before, after)) for layer, (before, after) in enumerate(pairs))
        return float(self.scale * total ** (self.slope / self.power))

    def fitted(self, schedules: Sequence[Sequence[int]], divergences: Sequence[float]) -> DamageModel:
        """The model that predicts these divergences best, by their logarithms. The slope takes three schedules."""
        y, best, least = np.log(np.maximum(divergences, _FLOOR)), self, np.inf
        for power in _POWERS if len(schedules) > 1 else (self.power,):
            model = dataclasses.replace(self, power=float(power), scale=1.0, slope=1.0)
            x = np.log([max(model(removed), _FLOOR) for removed in schedules])
            slope = 1.0
            if len(schedules) > 2 and np.ptp(x) > 0:
                slope = float(np.clip(np.polyfit(x, y, 1)[0], *_SLOPES))
            off = y - slope * x
            if (spread := float(np.var(off) + 0.02 * np.mean(off) ** 2)) < least:
                best, least = dataclasses.replace(model, scale=float(np.exp(np.mean(off))), slope=slope), spread
        return best
