"""The result of a search: the chosen candidate, the doubts about the choice, and the table of all candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..sizes import size_text
from .goals import Goal
from .judge import Judgement
from .results import Candidate

#: The columns of the table; `cells` fills all but the first.
COLUMNS = (
    *("#", "attention", "reducer", "size", "batch", "ms", "speed-up (quartiles)", "accuracy drop (95 %)"),
    *("top-1 agreement (95 %)", "MACs", "note"),
)
HOW_TO_READ = (
    "speed-up: median ratio to the baseline, all timed in one interleaved benchmark. ms: milliseconds per image.",
    "accuracy drop: expected percentage points of top-1, from the baseline's confidence, calibrated if --accuracy is "
    "given; no labels were used.",
    "top-1 agreement: share of the images with the baseline's prediction. MACs: share of the baseline's that remains.",
)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    chosen: the candidate that meets the goal best.
    candidates: all candidates, the unchanged model first, then by rising speed-up.
    goal: the bound that was given.
    reason: why `chosen` was chosen.
    fresh: the judgement of `chosen` on images that had no part in the search or the choice.
    images: the number of images in total.
    notes: what was not searched, with the reason.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    goal: Goal
    reason: str
    fresh: Judgement
    images: int
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The unchanged model, and the candidates that no other beats in both speed-up and expected drop."""
        return tuple(c for c in self.candidates if not c.changed or not any(o.beats(c) for o in self.candidates))

    @property
    def attention(self) -> str:
        """The attention spec of every layer, as `convert` takes it."""
        return self.chosen.attention

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers to convert; the others stay unchanged."""
        return self.chosen.layers

    @property
    def tokens(self) -> str:
        """The spec of the token reducer, as `convert` takes it; empty: no change."""
        return self.chosen.tokens

    def convert(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model`, converted as chosen."""
        return self.chosen.change.convert(model)

    def note(self, candidate: Candidate) -> str:
        """A short note on a candidate, for its row of the table."""
        if candidate == self.chosen:
            return "chosen"
        if not candidate.changed:
            return "unchanged model"
        if not candidate.faster:
            return "slower" if candidate.timed.comparison.interval[1] < 1 else "speed-up not significant"
        bound = self.goal.max_drop
        if bound is not None and candidate.expected_drop <= bound < candidate.typical_drop:
            return f"typical drop {candidate.typical_drop:.1f}"
        return "" if candidate in self.front else "not on the front"

    @property
    def doubt(self) -> str:
        """A doubt about the choice that the measurements leave; empty if there is none."""
        if self.chosen.changed:
            return self.goal.doubt(self.fresh, self.images)
        perhaps = [c for c in self.candidates if c.speedup > 1.02 and not c.faster and self.goal.fits(c)]
        met = self.goal.target_ms is not None and self.goal.fits(self.chosen)
        if met or not perhaps:
            return ""
        best = max(perhaps, key=lambda c: c.speedup)
        return f"a speed-up of {best.speedup:.2f}× is not significant: use a larger budget or a less busy machine"

    @property
    def findings(self) -> list[str]:
        """The result in a few lines."""
        setting = self.chosen.setting
        lines = [f"chosen at {size_text(setting.size)} px, batch {setting.batch}: {self.reason}"]
        if self.chosen.changed:
            judged = f"expected accuracy drop {self.fresh.drop_text()} percentage points"
            judged += f", top-1 agreement {self.fresh.agreement_text()}"
            lines += [f"on {self.fresh.images} fresh images, unused by the search and the choice: {judged}"]
        return lines + [f"note: {note}" for note in (self.doubt, *self.notes) if note]

    def as_dict(self) -> dict[str, Any]:
        """The choice as JSON; `candidates` are the rows."""
        fresh = dataclasses.asdict(self.fresh) if self.chosen.changed else None
        found = {
            "reason": self.reason,
            "fresh": fresh,
            "doubt": self.doubt or None,
            "all_images": self.images,
            "notes": list(self.notes),
        }
        return self.chosen.as_dict() | found

    def __str__(self) -> str:
        rows = table([self])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self.findings, f"  {self.attention}", *[f"  {self.tokens}"] * bool(self.tokens)])


def table(found: Sequence[Tuned]) -> list[tuple[str, ...]]:
    """The column titles, then one numbered row for each candidate."""
    rows = [cells(c, tuned.note(c)) for tuned in found for c in tuned.candidates]
    return [COLUMNS, *((str(number), *row) for number, row in enumerate(rows, 1))]


def cells(c: Candidate, note: str) -> tuple[str, ...]:
    """The row of a candidate in the table, without its number."""
    low, high = c.timed.comparison.quartiles
    return (
        c.attention,
        c.tokens or "–",
        size_text(c.setting.size),
        str(c.setting.batch),
        f"{c.latency_ms:.2f}",
        f"{c.speedup:.2f}× ({low:.2f}–{high:.2f})" if c.changed else "1.00×",
        c.judged.drop_text() if c.changed else "–",
        c.judged.agreement_text() if c.changed else "–",
        f"{100 * c.cost.macs:.1f} %",
        note,
    )
