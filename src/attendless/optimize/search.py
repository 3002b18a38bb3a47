"""The settings that every step of one search uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from .block_runtimes import EAGER_BLOCKS, BlockRuntime
from .judge import Distance, divergence, expected_drop
from .resume_log import ResumeLog

#: (description, number of steps) → a context manager that yields a function to call with the steps done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def silent(description: str, steps: int) -> Iterator[Callable[[int], None]]:
    """A `Progress` that shows nothing."""
    yield lambda done: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of one search.

    images: unlabelled, preprocessed images [n, 3, H, W] for the search.
    batch: batch size to time.
    points: number of points on each trade-off curve.
    budget: seconds of timing for each measurement.
    log: values that were measured before.
    progress: reports the steps done.
    expired: whether the time for the search is over; steps that have something to show then end early.
    distance: how far outputs are from the baseline's.
    drop: the drop of outputs on `images` against the baseline's, in points.
    where: the runtime in which single blocks are timed.
    """

    images: Tensor
    batch: int = 1
    points: int = 8
    budget: float = 10.0
    log: ResumeLog = dataclasses.field(default_factory=lambda: ResumeLog())
    progress: Progress = silent
    expired: Callable[[], bool] = lambda: False
    distance: Distance = divergence
    drop: Distance = expected_drop
    where: BlockRuntime = dataclasses.field(default_factory=lambda: EAGER_BLOCKS)
