"""Progress of a comparison and an estimate of its duration: a step of each model is timed first, then the files of the
runs are watched."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from attendless.data.source import Source
from attendless.sizes import channels, input_size
from attendless.train.log import duration, read_rows

from .build import build
from .run import Job
from .variants import Variant

#: Receives a label and a total, and gives a function that receives the increments.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
#: Seconds between two reads of the runs' files.
_LOOK = 1.0


@contextlib.contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@contextlib.contextmanager
def watched(jobs: Sequence[Job], steps: Mapping[Variant, int], progress: Progress) -> Iterator[None]:
    """Inside the context, report to `progress` the steps that all runs together have taken."""
    total, ended = sum(steps[job.variant] for job in jobs), threading.Event()
    if not total:
        yield
        return

    def watch(advance: Callable[[int], None]) -> None:
        before = 0
        while not ended.wait(_LOOK):
            now = sum(_taken(Path(job.folder)) for job in jobs)
            advance(max(0, now - before))
            before = max(now, before)

    with progress(f"training, {len(jobs)} runs: steps", total) as advance:
        watching = threading.Thread(target=watch, args=(advance,), daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()


def _taken(folder: Path) -> int:
    rows = read_rows(folder / "metrics.jsonl")
    return int(rows[-1].get("step", 0)) if rows else 0


def estimate(jobs: Sequence[Job], steps: Mapping[Variant, int], sources: Mapping[str, Source], *, at_once: int) -> str:
    """The estimated duration of the runs as text; one step of every variant is timed."""
    a_step = {c: _seconds_a_step(c, len(sources[c.setting.data].classes)) for c in {job.variant for job in jobs}}
    seconds = sum(steps[job.variant] * a_step[job.variant] for job in jobs) / min(at_once, len(jobs))
    return f"{len(jobs)} runs, {min(at_once, len(jobs))} at a time: about {duration(seconds)}, then costs are measured"


def _seconds_a_step(variant: Variant, classes: int) -> float:
    """Forward and backward pass of one batch. Loading images and the optimiser add little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model: Any = build(variant, classes).train()
        images = torch.randn(variant.setting.recipe.batch, channels(model), *input_size(model))
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            model(images).float().square().mean().backward()
            taken = time.perf_counter() - began
        return taken
    finally:
        torch.set_num_threads(before)
