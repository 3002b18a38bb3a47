"""What `optimize` found: the chosen variant, all others, and what the fresh images say of the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..sizes import size_text
from .goals import Goal
from .judge import Judgement
from .results import Point, Setting
from .variants import EAGER, Prepared, Target, Variant, Workshop

COLUMNS = (
    *("#", "runtime", "precision", "attention", "reducer", "ms", "speed-up (quartiles)", "accuracy drop (95 %)"),
    *("top-1 agreement (95 %)", "note"),
)
HOW_TO_READ = (
    "speed-up: median ratio to the original model in eager fp32, timed in the runtime, precision, batch and threads of "
    "the row. ms: milliseconds per image.",
    "accuracy drop: percentage points against the original fp32 model, on the images of the choice: expected from its "
    "confidence, calibrated if there are labels.",
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
class Findings:
    """What `optimize` found; `Optimized` documents the fields."""

    chosen: Outcome
    outcomes: tuple[Outcome, ...]
    goal: Goal
    reason: str
    fresh: Judgement
    accuracy: tuple[float, float] | None
    images: int
    setting: Setting
    scored_by: str
    notes: tuple[str, ...]
    stamp: Mapping[str, Any]
    workshop: Workshop = dataclasses.field(repr=False, compare=False)
    prepared: Prepared = dataclasses.field(repr=False, compare=False)

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
        return self.goal.doubt(self.fresh, self.images) if self.chosen.changed else ""

    def note(self, outcome: Outcome) -> str:
        """A short note on a variant, for its row of the table."""
        if outcome == self.chosen:
            return "chosen"
        if outcome == self.outcomes[0]:
            return "original model"
        if not outcome.faster:
            return "slower" if outcome.timed.comparison.interval[1] < 1 else "speed-up not significant"
        if self.goal.bound is not None and not self.goal.fits(outcome):
            return "beyond the goal"
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
            drop = f"{self.scored_by} {self.fresh.drop_text()}, top-1 agreement {self.fresh.agreement_text()}"
            lines.append(f"on {self.fresh.images} fresh images, against the original fp32 model: {drop}")
        if self.accuracy is not None:
            before, after = self.accuracy
            lines.append(f"top-1 on the fresh images: {after:.2f} %, original {before:.2f} %")
        return lines + [f"note: {note}" for note in (self.doubt, *self.notes) if note]

    def table(self) -> list[tuple[str, ...]]:
        """The column titles, then one row for each variant, by rising speed-up."""
        rows = sorted(self.outcomes, key=lambda c: c.speedup)
        return [COLUMNS, *(_cells(i, c, self.note(c)) for i, c in enumerate(rows, 1))]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        goal = {name: value for name, value in dataclasses.asdict(self.goal).items() if value is not None}
        return {
            "goal": goal,
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


def _cells(number: int, c: Outcome, note: str) -> tuple[str, ...]:
    (low, high), change = c.timed.comparison.quartiles, c.variant.change
    attention = f"{change.attention}{' (class-token-only last layer)' if change.readout else ''}"
    exact = c.judged.images == 0
    return (
        str(number),
        c.target.runtime,
        c.target.precision,
        attention if change else "unmodified",
        change.tokens or "–",
        f"{c.latency_ms:.2f}",
        f"{c.speedup:.2f}× ({low:.2f}–{high:.2f})",
        "–" if exact else c.judged.drop_text(),
        "–" if exact else c.judged.agreement_text(),
        note,
    )
