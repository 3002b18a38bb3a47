"""What `optimize` found: the chosen variant, all others, and what the fresh images say of the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..sizes import size_text
from .fresh import Example
from .goals import Goal
from .judge import Judgement
from .results import Point, Setting
from .variants import EAGER, Prepared, Target, Variant, Workshop

_COLUMNS = ("#", "runtime", "precision", "attention", "reducer", "ms", "speed-up (quartiles)")
#: The last columns: of classifiers, and of models that a metric scores.
_ACCURACY = ("accuracy drop (95 %)", "top-1 agreement (95 %)", "note")
_SCORES = ("drop (95 %)", "mean score", "note")
_SPEED = (
    "speed-up: median ratio to the original model in eager fp32, timed in the runtime, precision, batch and threads of "
    "the row. ms: milliseconds per image."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(Point):
    """A variant and everything that was measured of it."""

    variant: Variant

    @property
    def target(self) -> Target:
        return self.variant.target

    @property
    def changed(self) -> bool:
        """Whether the variant computes another function than the original model."""
        return bool(self.variant.change) or self.target.precision != "fp32"

    def as_dict(self) -> dict[str, Any]:
        """A row of the JSON output."""
        change = self.variant.change
        return {
            "runtime": self.target.runtime,
            "precision": self.target.precision,
            "dynamic_layers": list(self.target.dynamic),
            "attention": change.attention,
            "layers": list(change.layers),
            "tokens_spec": change.tokens or None,
            "readout": change.readout,
            "unmodified": not change,
            "latency_ms": self.latency_ms,
            "original_ms": self.timed.baseline_ms,
            "speedup": self.speedup,
            "quartiles": list(self.timed.comparison.quartiles),
            "pairs": self.timed.comparison.pairs,
            "faster": self.faster,
            "typical_drop": self.typical_drop,
            **dataclasses.asdict(self.judged),
        }


@dataclasses.dataclass(frozen=True)
class Step:
    """One bar of the waterfall: the speed-up and the drop after a step, both against the original in eager fp32."""

    name: str
    speedup: float
    drop: float


@dataclasses.dataclass(frozen=True)
class Parts:
    """Numbers of images: for calibration and search, for the choice, and judged in the end, of those `available`."""

    calibration: int
    choosing: int
    fresh: int
    available: int

    def __str__(self) -> str:
        rest = f" of {self.available}" if self.fresh < self.available else ""
        return (
            f"{self.calibration} for calibration and search, {self.choosing} for the choice, {self.fresh}{rest} fresh"
        )


@dataclasses.dataclass(frozen=True)
class Findings:
    """What `optimize` found; `Optimized` documents the fields."""

    chosen: Outcome
    outcomes: tuple[Outcome, ...]
    goal: Goal
    reason: str
    fresh: Judgement
    accuracy: tuple[float, float] | None
    images: int
    parts: Parts
    setting: Setting
    scored_by: str
    by_metric: bool
    notes: tuple[str, ...]
    stamp: Mapping[str, Any]
    workshop: Workshop = dataclasses.field(repr=False, compare=False)
    prepared: Prepared = dataclasses.field(repr=False, compare=False)
    examples: tuple[Example, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def front(self) -> tuple[Outcome, ...]:
        """The variants that no other beats in both speed-up and drop."""
        return tuple(c for c in self.outcomes if not any(o.beats(c) for o in self.outcomes))

    @property
    def unmodified(self) -> Outcome | None:
        """The fastest unmodified model that meets the goal, in any runtime and precision."""
        fitting = [c for c in self.outcomes if not c.variant.change and self.goal.fits(c)]
        return max(fitting, key=lambda c: c.speedup, default=None)

    @property
    def steps(self) -> list[Step]:
        """The contribution of runtime, precision and change to the chosen variant, one after the other."""
        target = self.chosen.target
        whole = {(c.target, bool(c.variant.change)): c for c in self.outcomes}
        found = [Step("original, eager fp32", 1.0, 0.0)]
        runtime, precision = whole.get((Target(target.runtime), False)), whole.get((target, False))
        if runtime is not None and target.runtime != EAGER.runtime:
            found.append(Step(target.runtime, runtime.speedup, runtime.expected_drop))
        if precision is not None and target.precision != EAGER.precision:
            found.append(Step(target.precision, precision.speedup, precision.expected_drop))
        if self.chosen.variant.change:
            found.append(Step("attention and tokens", self.chosen.speedup, self.chosen.expected_drop))
        return found

    @property
    def doubt(self) -> str:
        """A doubt about the choice that the fresh images leave; empty if there is none."""
        return self.goal.doubt(self.fresh, self.images, self.parts.available) if self.chosen.changed else ""

    def note(self, outcome: Outcome) -> str:
        """A short note on a variant, for its row of the table."""
        if outcome == self.chosen:
            return "chosen"
        if outcome == self.outcomes[0]:
            return "original model"
        if not outcome.faster:
            return "slower" if outcome.timed.comparison.interval[1] < 1 else "speed-up not significant"
        if self.goal.bound is not None and not self.goal.fits(outcome):
            typical = self.goal.min_agreement is None and outcome.likely_drop > outcome.expected_drop
            return f"beyond the goal: typical drop {outcome.likely_drop:.2f}" if typical else "beyond the goal"
        return "unmodified model" if not outcome.variant.change else ""

    @property
    def findings(self) -> list[str]:
        """The result in a few lines."""
        size, target = size_text(self.setting.size), self.chosen.target
        change = self.chosen.variant.change
        what = change if change else "the unmodified model"
        lines = [
            f"chosen at {size} px, batch {self.setting.batch}: {what} in {target}",
            f"reason: {self.reason}",
            f"latency {self.chosen.latency_ms:.2f} ms per image: {self.chosen.speedup:.2f}× as fast as the original "
            f"model in eager fp32 ({self.chosen.timed.baseline_ms:.2f} ms)",
        ]
        best = self.unmodified
        if best is not None and change:
            more = self.chosen.speedup / best.speedup
            lines.append(
                f"{more:.2f}× as fast as the fastest unmodified variant within the goal, {best.target} "
                f"({best.speedup:.2f}×)"
            )
        if self.chosen.changed:
            low, high = self.fresh.expected_drop_ci
            fresh = round(self.fresh.expected_drop, 2) + 0.0  # without a negative zero
            drop = f"{self.scored_by} {fresh:.2f} (95 % interval {low:.2f} to {high:.2f})"
            drop += f", {self._closeness(self.fresh, named=True)}"
            lines.append(f"on {self.fresh.images} fresh images, against the original fp32 model: {drop}")
        if self.accuracy is not None:
            before, after = self.accuracy
            lines.append(f"top-1 on the fresh images: {after:.2f} %, original {before:.2f} %")
        lines.append(f"images: {self.images} in total, {self.parts}")
        return lines + [f"note: {note}" for note in (self.doubt, *self.notes) if note]

    @property
    def how_to_read(self) -> tuple[str, ...]:
        """What the columns of the table mean."""
        if self.by_metric:
            return (
                _SPEED,
                "drop: of 100 · the mean score, against the original fp32 model, on the images of the choice.",
            )
        return _SPEED, (
            "accuracy drop: percentage points against the original fp32 model, on the images of the choice: expected "
            "from its confidence, calibrated if there are labels."
        )

    def _closeness(self, judged: Judgement, *, named: bool = False) -> str:
        """The top-1 agreement, or the mean score of a metric."""
        if self.by_metric:
            return f"{'mean score ' if named else ''}{judged.agreement:.4f}"
        return f"{'top-1 agreement ' if named else ''}{judged.agreement_text()}"

    def table(self) -> list[tuple[str, ...]]:
        """The column titles, then one row for each variant, by rising speed-up."""
        rows = sorted(self.outcomes, key=lambda c: c.speedup)
        columns = (*_COLUMNS, *(_SCORES if self.by_metric else _ACCURACY))
        return [columns, *((*_cells(i, c), *self._judged_cells(c), self.note(c)) for i, c in enumerate(rows, 1))]

    def _judged_cells(self, c: Outcome) -> tuple[str, str]:
        if c.judged.images == 0:  # computes what the original does
            return "–", "–"
        return c.judged.drop_text(), self._closeness(c.judged)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "goal": self.goal.given,
            "reason": self.reason,
            "chosen": self.chosen.as_dict(),
            "fresh": {**dataclasses.asdict(self.fresh), "top1": self.accuracy, "scored_by": self.scored_by},
            "doubt": self.doubt or None,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "size": list(self.setting.size),
            "batch": self.setting.batch,
            "all_images": self.images,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self.findings])


def _cells(number: int, c: Outcome) -> tuple[str, ...]:
    (low, high), change = c.timed.comparison.quartiles, c.variant.change
    attention = f"{change.attention}{' (exact conversion)' if change.readout else ''}"
    return (
        str(number),
        c.target.runtime,
        c.target.precision_text,
        attention if change else "unmodified",
        change.tokens or "–",
        f"{c.latency_ms:.2f}",
        f"{c.speedup:.2f}× ({low:.2f}–{high:.2f})",
    )
