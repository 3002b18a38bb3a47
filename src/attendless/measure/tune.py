"""Search, without training and without labels, what each layer should attend with: as few milliseconds as the answers
allow.

1. A search over the rates of each layer proposes mixes (`search.py`); every rate in all layers joins them.
2. Each is judged whole, on images the search has not seen: the accuracy it is expected to lose, and how often it gives
   the dense model's answer (`judge.py`).
3. All race together against the dense model, by turns, so that their speed-ups belong to the same minutes (`clock.py`).
4. The quickest that keeps the promise is chosen, by its speed-up. One that cannot be told from the dense model is no
   quicker.
5. The best of many looks better than it is: of the one chosen, the loss is judged once more, on fresh images.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.rebuild import host_copy
from ..convert.weights import check_finite
from ..errors import UserError
from . import search
from .clock import Call, Race, Timer, device_timer, race
from .judge import ITSELF, check_images, judge, jump, logits, losses, split
from .macs import count
from .tradeoff import Candidate, Goal, Tuned, convert_candidate

RATES = (0.05, 0.1, 0.25, 0.5)
#: The dense model's place in the race, and the rounds there are at least: a verdict takes 8.
_DENSE, _ROUNDS = "dense", 10


@contextmanager
def _silent(what: str, total: int) -> Iterator[Any]:
    yield lambda done: None


def tune(
    model: nn.Module,
    images: Tensor,
    *,
    attention: str = "foveal",
    rates: Sequence[float] = RATES,
    max_drop: float | None = None,
    target_ms: float | None = None,
    probe: int = 64,
    points: int = 8,
    budget: float = 10.0,
    progress: search.Progress = _silent,
) -> Tuned:
    """Find what each layer of `model` should attend with, judged on unlabelled, preprocessed `images` [n, 3, H, W].

    `attention` names a mechanism with a `keep` option; `max_drop` bounds the expected loss of top-1, in points (0.5 if
    neither bound is given), `target_ms` asks for a latency at batch 1 instead. Up to `probe` images serve the search;
    one half of the others chooses among what it found, up to `points` mixes and each rate in all layers, and the other
    half reports on the choice. Each candidate is timed for about `budget` seconds.
    """
    goal, specs = Goal(max_drop, target_ms), search.rates_of(attention, rates)
    if probe < 2 or points < 2 or not budget > 0:
        raise UserError(f"probe={probe}, points={points}, budget={budget}: expected 2, 2 and more than 0 seconds")
    check_images(images)
    check_finite(model.named_parameters(), "the model's weights are damaged")
    first = next(model.parameters())
    searched, seen, fresh = (part.to(first.device, first.dtype) for part in split(images, probe))
    dense, host = copy.deepcopy(model).eval(), host_copy(model).eval()
    if getattr(host, "num_classes", 2) < 2:
        raise UserError("the model has no classifier: tune judges by the answers it gives")
    mixes = search.mixes(host, specs, searched, points, budget, progress)
    candidates = [search.named(host, specs, mix) for mix in mixes]
    # The host stands for the dense model where answers are asked for, as it gives plain logits; the clock runs the
    # dense model itself.
    models = [host, *(_sharing(convert_candidate(model, *candidate).eval(), dense) for candidate in candidates[1:])]
    belief, answers = _answers(models, [text for text, _ in candidates], seen, progress)
    cost = jump(belief, [losses(belief, given) for given in answers])
    raced = _race([dense, *models[1:]], seen[:1], budget, progress)
    size = (images.shape[-2], images.shape[-1])
    cores = [count(one, size).core for one in models]
    found = [
        Candidate(
            text,
            layers,
            len(mixes[0]),
            size,
            core / cores[0],
            judge(belief, given, cost) if layers else ITSELF,
            raced.compare(place, _DENSE),
            1e3 * raced.median(_DENSE),
        )
        for (text, layers), core, given, place in zip(candidates, cores, answers, raced.seconds, strict=True)
    ]
    found[1:] = sorted(found[1:], key=lambda c: c.speedup)
    chosen, reason = goal.choose(found)
    judged = ITSELF
    if chosen.layers:
        winner = models[candidates.index((chosen.attention, chosen.layers))]
        belief, (_, given) = _answers([host, winner], ["the model", chosen.attention], fresh, progress)
        judged = judge(belief, given, cost)
    return Tuned(chosen, tuple(found), goal, reason, judged, len(images))


def _sharing(model: nn.Module, dense: nn.Module) -> nn.Module:
    """`model` with the dense model's own weights wherever they are equal: a dozen copies may not fit into memory, and
    in a race nobody should find weights warmer than others do."""
    theirs = dict(dense.named_parameters())
    for prefix, module in model.named_modules():
        for name, ours in module._parameters.items():
            same = theirs.get(f"{prefix}.{name}" if prefix else name)
            if ours is not None and same is not None and torch.equal(ours, same):
                module._parameters[name] = same
    return model


def _answers(
    models: Sequence[nn.Module], names: Sequence[str], images: Tensor, progress: search.Progress
) -> tuple[Tensor, list[Tensor]]:
    """The logits of the first model, which stands for the dense one, and the answers of all."""
    with progress(f"judging {len(models) - 1} on {len(images)} images", len(models) * len(images)) as step:
        belief = logits(models[0], images, "the model", step).cpu()
        others = [
            logits(one, images, name, step).argmax(-1).cpu() for one, name in zip(models[1:], names[1:], strict=True)
        ]
    return belief, [belief.argmax(-1), *others]


def _race(models: Sequence[nn.Module], image: Tensor, budget: float, progress: search.Progress) -> Race:
    """All models by turns, the dense one first, for `budget` seconds each or as long as a verdict takes."""

    def forward(model: nn.Module) -> Call:
        def call() -> object:
            with torch.inference_mode():
                return model(image)

        return call

    timer = device_timer(image.device)
    calls = {str(i) if i else _DENSE: forward(model) for i, model in enumerate(models)}
    lap = sum(timer(call) for call in calls.values())
    seconds = max(budget * (len(models) - 1), _ROUNDS * lap)
    with progress(f"timing {len(models)} models by turns, in seconds", math.ceil(seconds)) as step:
        return race(calls, timer=_ticking(timer, step), budget=seconds)


def _ticking(timer: Timer, step: Any) -> Timer:
    """The timer, telling of every whole second it has timed."""
    passed = 0.0

    def timed(call: Call) -> float:
        nonlocal passed
        found = timer(call)
        if whole := int(passed + found) - int(passed):
            step(whole)
        passed += found
        return found

    return timed
