"""Images a second on this machine, beside what a paper's machine did: another machine, so no agreement is claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from attendless.measure.clock import device_timer, interleave, warm_up
from attendless.sizes import channels, input_size

from .table import Row

#: Images at a time, and seconds for which a pair takes turns.
BATCH, BUDGET = 4, 6.0


def alone(models: Iterable[tuple[str, str, Callable[[], Any]]]) -> Iterator[Row]:
    """A row for each (row, printed throughput, how to build it): its quickest of a few calls."""
    for row, printed, build in models:
        seconds = warm_up(_call(build()), device_timer())
        yield Row(row, "throughput", "images/s", printed, BATCH / seconds, "this machine's, in evaluation")


def pairs(models: Iterable[tuple[str, str, Callable[[], Any], str, Callable[[], Any]]]) -> Iterator[Row]:
    """Two rows for each pair of which no throughput is printed, timed by turns, and how they compare."""
    for plain, _, build, less, build_less in models:
        found = interleave({plain: _call(build()), less: _call(build_less())}, budget=BUDGET)
        compared = found.compare(less, plain)
        low, high = compared.interval
        verdict = f"{compared.ratio:.2f}× {plain}'s speed, 99 % sure between {low:.2f} and {high:.2f}"
        for name, note in ((plain, ""), (less, verdict)):
            yield Row(name, "throughput", "images/s", "", BATCH / found.median(name), note)


def _call(model: Any) -> Callable[[], object]:
    images = torch.randn(BATCH, channels(model), *input_size(model), generator=torch.Generator().manual_seed(0))
    model.eval()

    def call() -> object:
        with torch.inference_mode():
            return model(images)

    return call
