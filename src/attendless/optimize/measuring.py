"""What every search does with its models: read their outputs on the same images, and time them in one benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..measure.clock import Call, Timer, Timings, interleave
from .judge import Distance, chunk_size, logits
from .search import Progress

Model = Callable[[Tensor], Tensor]
#: (outputs of a model, outputs of the baseline, their place among all images) → a JSON value per image, from which the
#: model is judged.
Read = Callable[[Tensor, Tensor, slice], list[Any]]

#: The least number of rounds of a benchmark: a verdict takes 8.
_ROUNDS = 10


def read_one(
    model: Model,
    images: Tensor,
    belief: Tensor,
    name: str,
    step: Callable[[int], None],
    read: Read,
    distance: Distance,
) -> tuple[list[Any], float]:
    """What `read` returns of one model's outputs, and their distance from the baseline's, `belief`.

    Outputs are read in parts: those of an encoder can be larger than its images.
    """
    found, total = list[Any](), 0.0
    for first in range(0, len(images), chunk_size(images)):
        part = slice(first, first + chunk_size(images))
        given = logits(model, images[part], name, step).cpu()
        found += read(given, belief[part], part)
        total += len(given) * distance(belief[part], given)
    return found, total / len(images)


def forward_call(model: Callable[[Tensor], object], images: Tensor) -> Call:
    """A forward pass to be timed."""

    def call() -> object:
        with torch.inference_mode():
            return model(images)

    return call


def benchmark(calls: Mapping[str, Call], seconds: float, progress: Progress, timer: Timer) -> Timings:
    """An interleaved benchmark of `seconds` seconds, or longer for a verdict. The first call is the baseline."""
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
