"""Latency of an exported file, compared with the model in PyTorch and with the original model exported the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..measure.clock import Call, Comparison, interleave
from ..measure.measurement import verdict
from ..stamp import stamp
from .checks import Run, images_like
from .description import Description

EAGER, DENSE = "eager", "dense"
_FILE = "file"


@dataclasses.dataclass(frozen=True)
class Speed:
    """Milliseconds of a call, and paired ratios: more than 1 means that the file is faster."""

    batch: int
    threads: int
    ms: float
    eager_ms: float
    against_eager: Comparison
    dense_ms: float | None
    against_dense: Comparison | None
    stamp: Mapping[str, Any]

    def __str__(self) -> str:
        text = f"{self.ms:.2f} ms, {verdict(self.against_eager, f'eager PyTorch, {self.eager_ms:.2f} ms')}"
        if self.against_dense is not None:
            dense = f"the original model exported the same way, {self.dense_ms:.2f} ms"
            text += f"; {verdict(self.against_dense, dense)}"
        return f"{text}; batch {self.batch}, {self.threads} thread{'s' if self.threads != 1 else ''}"


def time(file: Run, eager: Run, dense: Run | None, about: Description, *, budget: float, seed: int = 0) -> Speed:
    """Time the calls interleaved, for `budget` seconds each."""
    batch = about.batch or 1
    images = images_like(about, batch, seed)
    runs = {EAGER: eager, _FILE: file} | ({} if dense is None else {DENSE: dense})
    calls: dict[str, Call] = {name: lambda run=run: run(images) for name, run in runs.items()}  # type: ignore[misc]
    timings = interleave(calls, budget=budget * len(calls), seed=seed)
    return Speed(
        batch=batch,
        threads=torch.get_num_threads(),
        ms=1e3 * timings.median(_FILE),
        eager_ms=1e3 * timings.median(EAGER),
        against_eager=timings.compare(_FILE, EAGER),
        dense_ms=None if dense is None else 1e3 * timings.median(DENSE),
        against_dense=None if dense is None else timings.compare(_FILE, DENSE),
        stamp=stamp(),
    )
