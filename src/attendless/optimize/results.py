"""What a search measures of a model, and a candidate: a change with its measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..measure.clock import Comparison
from ..sizes import Size
from .candidates import Change
from .judge import Judgement


@dataclasses.dataclass(frozen=True)
class Setting:
    """The conditions of the measurement: image size, batch size, and the number of layers that attend."""

    size: Size
    batch: int
    depth: int


@dataclasses.dataclass(frozen=True)
class CostShare:
    """The share of the baseline's MACs that remains, of the whole model and of its attention cores."""

    macs: float
    core: float


@dataclasses.dataclass(frozen=True)
class Timing:
    """The speed-up over the baseline, and the baseline's milliseconds per image."""

    comparison: Comparison
    baseline_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the trade-off between speed and accuracy.

    judged: top-1 agreement and expected accuracy drop.
    typical_drop: the drop, in percentage points, of candidates whose predictions diverge as much.
    timed: the speed-up over the baseline.
    """

    judged: Judgement
    typical_drop: float
    timed: Timing

    @property
    def speedup(self) -> float:
        return self.timed.comparison.ratio

    @property
    def latency_ms(self) -> float:
        """Milliseconds per image: the baseline's, divided by the speed-up."""
        return self.timed.baseline_ms / self.speedup

    @property
    def expected_drop(self) -> float:
        return self.judged.expected_drop

    @property
    def likely_drop(self) -> float:
        """The drop by which candidates are chosen: the larger of the measured and the typical one.

        With many candidates, the smallest measured drop is partly noise.
        """
        return max(self.expected_drop, self.typical_drop)

    @property
    def agreement(self) -> float:
        return self.judged.agreement

    @property
    def faster(self) -> bool:
        """Whether the candidate is significantly faster than the baseline."""
        return self.timed.comparison.enough and self.timed.comparison.distinguishable and self.speedup > 1

    def beats(self, other: Point) -> bool:
        """Whether the candidate is better in speed-up or drop, and worse in neither."""
        return (
            self.speedup >= other.speedup
            and self.expected_drop <= other.expected_drop
            and (self.speedup, self.expected_drop) != (other.speedup, other.expected_drop)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Point):
    """A point that `tune` found.

    change: how the candidate differs from the model.
    setting: the conditions under which it was measured.
    cost: the share of MACs that remains.
    """

    change: Change
    setting: Setting
    cost: CostShare

    @property
    def attention(self) -> str:
        return self.change.attention

    @property
    def layers(self) -> tuple[int, ...]:
        return self.change.layers

    @property
    def tokens(self) -> str:
        return self.change.tokens

    @property
    def changed(self) -> bool:
        """Whether the candidate differs from the model."""
        return bool(self.change)

    def as_dict(self) -> dict[str, Any]:
        """A row of the JSON output."""
        return {
            "attention": self.attention,
            "layers": list(self.layers),
            "tokens_spec": self.tokens or None,
            "size": list(self.setting.size),
            "batch": self.setting.batch,
            "latency_ms": self.latency_ms,
            "dense_latency_ms": self.timed.baseline_ms,
            "speedup": self.speedup,
            "quartiles": list(self.timed.comparison.quartiles),
            "pairs": self.timed.comparison.pairs,
            "quicker": self.faster,
            "macs_share": self.cost.macs,
            "core_share": self.cost.core,
            "typical_drop": self.typical_drop,
            **dataclasses.asdict(self.judged),
        }
