"""Throughput on this machine. A paper's throughput is of another machine, so the two are not compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from attendless.measure.clock import device_timer, interleave, warm_up
from attendless.sizes import channels, input_size

from .table import Row

#: Batch size, and seconds of the interleaved benchmark of a pair.
BATCH, BUDGET = 4, 6.0


def alone(models: Iterable[tuple[str, str, Callable[[], Any]]]) -> Iterator[Row]:
    """A row for each (row, printed throughput, function that builds the model): the fastest of a few calls."""
    for row, printed, build in models:
        seconds = warm_up(_call(build()), device_timer())
        yield Row(row, "throughput", "images/s", printed, BATCH / seconds, "ours is inference on this machine")


def pairs(models: Iterable[tuple[str, str, Callable[[], Any], str, Callable[[], Any]]]) -> Iterator[Row]:
    """Two rows for each pair of models without printed throughput, from an interleaved benchmark, with the speed-up."""
    for plain, _, build, less, build_less in models:
        found = interleave({plain: _call(build()), less: _call(build_less())}, budget=BUDGET)
        compared = found.compare(less, plain)
        low, high = compared.interval
        verdict = f"speed-up over {plain} {compared.ratio:.2f}× (99 % interval {low:.2f} to {high:.2f})"
        for name, note in ((plain, ""), (less, verdict)):
            yield Row(name, "throughput", "images/s", "", BATCH / found.median(name), note)


def _call(model: Any) -> Callable[[], object]:
    images = torch.randn(BATCH, channels(model), *input_size(model), generator=torch.Generator().manual_seed(0))
    model.eval()

    def call() -> object:
        with torch.inference_mode():
            return model(images)

    return call
