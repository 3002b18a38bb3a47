"""What every search does with its models: read their outputs on the same images, and time them in one benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..measure.clock import Call, Timer, Timings, device_timer, interleave
from .judge import divergence, logits
from .search import Progress, Search

Model = Callable[[Tensor], Tensor]
#: (outputs of a model, outputs of the baseline) → a JSON value per image, from which the model is judged.
Read = Callable[[Tensor, Tensor], list[Any]]

#: The least number of rounds of a benchmark: a verdict takes 8.
_ROUNDS = 10


def predictions(found: Tensor, belief: Tensor) -> list[int]:
    """The `Read` of a classifier: the class with the largest logit."""
    return found.argmax(-1).tolist()


def read_all(
    models: Sequence[Model], names: Sequence[str], images: Tensor, part: str, search: Search, read: Read = predictions
) -> tuple[Tensor, list[list[Any]], list[float]]:
    """The outputs of the first model, the baseline; what `read` returns of each, and their divergence from it.

    `part` names the images in the log.
    """
    description = f"judging {len(models) - 1} on {len(images)} images"
    with search.progress(description, len(models) * len(images)) as step:
        belief = logits(models[0], images, "the model", step).cpu()
        found, divergences = [read(belief, belief)], [0.0]
        for model, name in zip(models[1:], names[1:], strict=True):
            measure = partial(read_one, model, images, belief, name, step, read)
            given, far = search.log.get(f"predictions and divergence of {name}, {part}", measure)
            found.append(given)
            divergences.append(far)
    return belief, found, divergences


def read_one(
    model: Model, images: Tensor, belief: Tensor, name: str, step: Callable[[int], None], read: Read
) -> tuple[list[Any], float]:
    """What `read` returns of one model's outputs, and their divergence from the baseline's, `belief`."""
    found = logits(model, images, name, step).cpu()
    return read(found, belief), divergence(belief, found)


def forward_call(model: Callable[[Tensor], object], images: Tensor) -> Call:
    """A forward pass to be timed."""

    def call() -> object:
        with torch.inference_mode():
            return model(images)

    return call


def benchmark(calls: Mapping[str, Call], seconds: float, progress: Progress, timer: Timer | None = None) -> Timings:
    """An interleaved benchmark of `seconds` seconds, or longer for a verdict. The first call is the baseline."""
    timer = timer or device_timer()
    round_seconds = sum(timer(call) for call in calls.values())
    seconds = max(seconds, _ROUNDS * round_seconds)
    warm_up = 4 * round_seconds  # the benchmark calls each model about four times before it counts
    with progress(f"benchmarking {len(calls)} models, in seconds", math.ceil(seconds + warm_up)) as step:
        return interleave(calls, timer=_reporting(timer, step), budget=seconds)


def _reporting(timer: Timer, step: Callable[[int], None]) -> Timer:
    """`timer`, which also reports every whole second."""
    passed = 0.0

    def timed(call: Call) -> float:
        nonlocal passed
        found = timer(call)
        if whole := int(passed + found) - int(passed):
            step(whole)
        passed += found
        return found

    return timed
