"""What `tune` finds: candidates with their speed and their loss, the goal they were measured by, and the one chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..convert import convert
from ..convert.conversion import backbone_copy
from ..errors import UserError
from ..measure.clock import Comparison
from ..sizes import Size, size_text
from .judge import Judgement, images_to_tell

#: The columns of the table; `Candidate.cells` fills all but the first.
COLUMNS = (
    *("#", "attention", "reducer", "size", "batch", "ms", "speed-up (quartiles)", "expected loss (95 %)"),
    *("same answer (95 %)", "MACs", "note"),
)
HOW_TO_READ = (
    "speed-up: median ratio to the dense model, all timed by turns; ms an image: the dense model's, divided by it.",
    "expected loss: points of top-1, taking the dense model to be as sure as it says, or as right as --accuracy says; "
    "no labels were used.",
    "same answer: share of the images answered as by the dense model. MACs: what is left of the whole model's.",
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One point of the trade-off: what every layer attends with, what reduces the tokens, and what was found of it.

    `typical_drop` is what candidates lose whose answers moved as far, in points.
    `layers` are those changed of `depth`: in a model with attentions of its own, `attention` counts for them alone.
    Without `tokens`, what the model has of that stays. Times are of one image, of a batch of `batch`.
    """

    attention: str
    layers: tuple[int, ...]
    tokens: str
    depth: int
    size: Size
    macs_share: float
    core_share: float
    judged: Judgement
    typical_drop: float
    timed: Comparison
    dense_ms: float
    batch: int = 1

    @property
    def changed(self) -> bool:
        """Whether it is another than the model as it is."""
        return bool(self.layers or self.tokens)

    @property
    def speedup(self) -> float:
        return self.timed.ratio

    @property
    def latency_ms(self) -> float:
        """Milliseconds an image: the dense model's, divided by the speed-up."""
        return self.dense_ms / self.speedup

    @property
    def expected_drop(self) -> float:
        return self.judged.expected_drop

    @property
    def likely_drop(self) -> float:
        """The points it is to be chosen by: what it lost, or what is typical, so that luck is not chosen."""
        return max(self.expected_drop, self.typical_drop)

    @property
    def agreement(self) -> float:
        return self.judged.agreement

    @property
    def quicker(self) -> bool:
        """Whether it can be told from the dense model, and is the quicker one."""
        return self.timed.enough and self.timed.distinguishable and self.speedup > 1

    def beats(self, other: Candidate) -> bool:
        """Whether it is better in speed-up or loss, and worse in neither."""
        return (
            self.speedup >= other.speedup
            and self.expected_drop <= other.expected_drop
            and (self.speedup, self.expected_drop) != (other.speedup, other.expected_drop)
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "attention": self.attention,
            "layers": list(self.layers),
            "tokens_spec": self.tokens or None,
            "size": list(self.size),
            "batch": self.batch,
            "latency_ms": self.latency_ms,
            "dense_latency_ms": self.dense_ms,
            "speedup": self.speedup,
            "quartiles": list(self.timed.quartiles),
            "pairs": self.timed.pairs,
            "quicker": self.quicker,
            "macs_share": self.macs_share,
            "core_share": self.core_share,
            "typical_drop": self.typical_drop,
            **dataclasses.asdict(self.judged),
        }

    def cells(self, note: str = "") -> tuple[str, ...]:
        low, high = self.timed.quartiles
        dense = not self.changed
        return (
            self.attention,
            self.tokens or "–",
            size_text(self.size),
            str(self.batch),
            f"{self.latency_ms:.2f}",
            "1.00×" if dense else f"{self.speedup:.2f}× ({low:.2f}–{high:.2f})",
            "–" if dense else self.judged.drop_text(),
            "–" if dense else self.judged.agreement_text(),
            f"{100 * self.macs_share:.1f} %",
            note,
        )


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is asked for: the points of top-1 that may be lost, or the milliseconds an image may take."""

    max_drop: float | None = None
    target_ms: float | None = None

    def __post_init__(self) -> None:
        if self.max_drop is not None and self.target_ms is not None:
            raise UserError("give max_drop or target_ms, not both")
        if self.max_drop is None and self.target_ms is None:
            object.__setattr__(self, "max_drop", 0.5)
        if self.max_drop is not None and not 0 <= self.max_drop <= 100:
            raise UserError(f"max_drop={self.max_drop}: expected the points of top-1 that may be lost, 0 to 100")
        if self.target_ms is not None and not 0 < self.target_ms < math.inf:
            raise UserError(f"target_ms={self.target_ms}: expected milliseconds an image may take, more than 0")

    @property
    def reach(self) -> float:
        """Points of expected loss beyond which nothing is worth a look."""
        return 20.0 if self.max_drop is None else 2 * self.max_drop + 1

    def fits(self, c: Candidate) -> bool:
        if self.target_ms is not None:
            return c.latency_ms <= self.target_ms
        return c.likely_drop <= (self.max_drop or 0)

    def choose(self, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        """The best of the candidates, of which the first is the model as it is, and why."""
        dense, quicker = candidates[0], [c for c in candidates if c.quicker]
        fitting = [c for c in quicker if self.fits(c)]
        if self.target_ms is not None:
            return self._within_time(dense, quicker, fitting)
        bound = f"expected to lose at most {points_text(self.max_drop or 0)}"
        if fitting:
            return max(fitting, key=lambda c: c.speedup), f"the quickest of those {bound}"
        nothing = f"nothing {bound}" if quicker else "nothing"
        return dense, f"{nothing} is measurably quicker than the model as it is"

    def _within_time(
        self, dense: Candidate, quicker: Sequence[Candidate], fitting: Sequence[Candidate]
    ) -> tuple[Candidate, str]:
        target = f"{self.target_ms:g} ms"
        if self.fits(dense):
            return dense, f"the model as it is already takes no more than {target}"
        if fitting:
            return min(fitting, key=lambda c: (c.likely_drop, -c.speedup)), f"the most faithful within {target}"
        if quicker:
            return max(quicker, key=lambda c: c.speedup), f"nothing reaches {target}: this is the quickest found"
        return dense, f"nothing reaches {target}, or is measurably quicker than the model as it is"

    def doubt(self, fresh: Judgement, images: int) -> str:
        """What the fresh images say against the choice, of `images` in all; nothing if they bear it out."""
        bound, (low, high) = self.max_drop, fresh.expected_drop_ci
        if bound is None or high <= bound:
            return ""
        if low > bound:
            return f"fresh images say that it loses more than {points_text(bound)}: search with more than {images}"
        needed = images_to_tell(fresh, bound) * images / fresh.images
        more = f"about {float(f'{needed:.1g}'):,.0f} images in all would, if it is what it seems"
        more = more if needed < 1e6 else "nor would a million"
        return f"{fresh.images} fresh images cannot tell whether it loses at most {points_text(bound)}; {more}"


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The candidate chosen, and all it was chosen from: the model as it is first, then by rising speed-up.

    `fresh` is the judgement of the chosen one on images that had no part in the search or the choice.
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
        """The candidates that none beats in both speed-up and expected loss, and the model as it is."""
        return tuple(c for c in self.candidates if not c.changed or not any(o.beats(c) for o in self.candidates))

    @property
    def attention(self) -> str:
        """What the layers chosen attend with, as `convert` takes it."""
        return self.chosen.attention

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers to convert; the others stay as they are."""
        return self.chosen.layers

    @property
    def tokens(self) -> str:
        """What reduces the tokens, as `convert` takes it; empty if they stay as they are."""
        return self.chosen.tokens

    def convert(self, model: nn.Module) -> Any:
        """`model` as it was tuned; a copy, as always."""
        return convert_candidate(model, self.attention, self.layers, self.tokens)

    def note(self, candidate: Candidate) -> str:
        """A word on a candidate, for its row."""
        if candidate == self.chosen:
            return "chosen"
        if not candidate.changed:
            return "the model as it is"
        if not candidate.quicker:
            return "slower" if candidate.timed.interval[1] < 1 else "not surely quicker"
        bound = self.goal.max_drop
        if bound is not None and candidate.expected_drop <= bound < candidate.typical_drop:
            return f"likely to lose {candidate.typical_drop:.1f}"
        return "" if candidate in self.front else "beaten"

    @property
    def doubt(self) -> str:
        """What could still be wrong with the choice; nothing if it stands."""
        if self.chosen.changed:
            return self.goal.doubt(self.fresh, self.images)
        perhaps = [c for c in self.candidates if c.speedup > 1.02 and not c.quicker and self.goal.fits(c)]
        content = self.goal.target_ms is not None and self.goal.fits(self.chosen)
        if content or not perhaps:
            return ""
        best = max(perhaps, key=lambda c: c.speedup)
        return f"{best.speedup:.2f}× was seen, but not surely: a larger budget, or a quieter machine, would tell"

    @property
    def findings(self) -> list[str]:
        """What came of it, in a few lines."""
        at_once = f", {self.chosen.batch} images at once" if self.chosen.batch > 1 else ""
        lines = [f"chosen at {size_text(self.chosen.size)} px{at_once}: {self.reason}"]
        if self.chosen.changed:
            lines += [
                f"on {self.fresh.images} fresh images, which had no part in the search or the choice: expected loss "
                f"{self.fresh.drop_text()} points, same answer on {self.fresh.agreement_text()}"
            ]
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


def points_text(count: float) -> str:
    return f"{count:g} point{'s' if count != 1 else ''}"


def table(found: Sequence[Tuned]) -> list[tuple[str, ...]]:
    """The heads of the columns, and a row for every candidate, numbered through."""
    rows = [c.cells(tuned.note(c)) for tuned in found for c in tuned.candidates]
    return [COLUMNS, *((str(number), *row) for number, row in enumerate(rows, 1))]


def convert_candidate(model: nn.Module, attention: str, layers: Sequence[int], tokens: str) -> Any:
    """A copy of `model` in which just these layers attend so, whether or not that pays here, on the tokens left."""
    if not layers and not tokens:
        return backbone_copy(model)
    return convert(
        model,
        attention if layers else None,
        layers=layers if layers else None,
        tokens=tokens or None,
        below_breakeven="keep",
    )
