"""The values a run is described by: its phases, its pictures, and where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..data.source import Source
from .learning import Learning


@dataclasses.dataclass(frozen=True)
class Phase:
    """One stretch of a run, as data: which parameters learn, from which losses, by which recipe."""

    name: str
    recipe: Learning
    losses: Mapping[str, float]
    trained: tuple[str, ...] = ("*",)


@dataclasses.dataclass(frozen=True)
class Data:
    """Pictures to learn from and to be judged on, and how the model wants them."""

    train: Source
    val: Source
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: How many answers the model chooses from, and whether the labels are among them.
    classes: int
    labelled: bool = True
    #: The names of these answers, where they are known.
    names: tuple[str, ...] = ()


@dataclasses.dataclass
class Progress:
    """Where a run is: all of it goes into a checkpoint."""

    phase: int = 0
    #: Steps done in this phase, and in the phases before it.
    step: int = 0
    before: int = 0
    best: float | None = None
    #: Sums of each loss term over the epoch so far, and how many steps they cover.
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    counted: int = 0
    bad_images: list[int] = dataclasses.field(default_factory=list)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    finished: bool = False

    @property
    def total(self) -> int:
        return self.before + self.step
