"""The values that describe a run: phases, data and progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..data.source import Source
from .learning import Learning


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a run.

    name: The name that `--phase` refers to.
    recipe: Training settings.
    losses: Weight of each loss term.
    trained: Patterns of the names of the parameters to train.
    """

    name: str
    recipe: Learning
    losses: Mapping[str, float]
    trained: tuple[str, ...] = ("*",)


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and validation images, and the preprocessing of the model."""

    train: Source
    val: Source
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: Number of classes of the model, and whether the labels are classes of the model.
    classes: int
    labelled: bool = True
    #: Class names, if known.
    names: tuple[str, ...] = ()


@dataclasses.dataclass
class Progress:
    """Progress of a run, stored in checkpoints."""

    phase: int = 0
    #: Steps done in this phase, and in the phases before it.
    step: int = 0
    before: int = 0
    best: float | None = None
    #: Sum of each loss term over the current epoch, and the number of steps in it.
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    counted: int = 0
    bad_images: list[int] = dataclasses.field(default_factory=list)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    finished: bool = False

    @property
    def total(self) -> int:
        return self.before + self.step
