"""The goal of a search, and the choice of the candidate that meets it best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from ..errors import UserError
from .judge import Judgement, images_needed


class Measured(Protocol):
    """What a goal asks of a candidate."""

    @property
    def faster(self) -> bool: ...
    @property
    def speedup(self) -> float: ...
    @property
    def latency_ms(self) -> float: ...
    @property
    def likely_drop(self) -> float: ...
    @property
    def agreement(self) -> float: ...


C = TypeVar("C", bound=Measured)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on the accuracy drop, in percentage points of top-1, on the latency, in milliseconds per image, or on
    the top-1 agreement with the baseline, a share of the images.

    Without any bound, `max_drop` is 0.5. `drop` names what `max_drop` bounds.
    """

    max_drop: float | None = None
    target_ms: float | None = None
    min_agreement: float | None = None
    drop: str = dataclasses.field(default="accuracy drop", kw_only=True)

    def __post_init__(self) -> None:
        given = list(self.given)
        if len(given) > 1:
            raise UserError(f"give {' or '.join(given)}, not {'both' if len(given) == 2 else 'all'}")
        if not given:
            object.__setattr__(self, "max_drop", 0.5)
        if self.min_agreement is not None and not 0 < self.min_agreement <= 1:
            raise UserError(f"min_agreement={self.min_agreement}: expected a share of the images, above 0 and up to 1")
        if self.max_drop is not None and not 0 <= self.max_drop <= 100:
            raise UserError(f"max_drop={self.max_drop}: expected percentage points of top-1, 0 to 100")
        if self.target_ms is not None and not 0 < self.target_ms < math.inf:
            raise UserError(f"target_ms={self.target_ms}: expected milliseconds per image, more than 0")

    @property
    def given(self) -> dict[str, float]:
        """The bounds that were given, by name."""
        bounds = {"max_drop": self.max_drop, "target_ms": self.target_ms, "min_agreement": self.min_agreement}
        return {name: value for name, value in bounds.items() if value is not None}

    @property
    def reach(self) -> float:
        """The expected drop, in percentage points, above which the search drops a token schedule."""
        return 20.0 if self.bound is None else 2 * self.bound + 1

    @property
    def bound(self) -> float | None:
        """The bound of what `harm` returns; None for a bound on the latency."""
        return self.max_drop if self.min_agreement is None else 100 * (1 - self.min_agreement)

    def harm(self, candidate: Measured) -> float:
        """What is bounded besides latency: the drop in points, or the percentage of changed predictions."""
        return candidate.likely_drop if self.min_agreement is None else 100 * (1 - candidate.agreement)

    def bound_text(self) -> str:
        if self.min_agreement is not None:
            return f"a top-1 agreement of at least {100 * self.min_agreement:g} %"
        return f"an expected {self.drop} of at most {points_text(self.max_drop or 0)}"

    def fits(self, candidate: Measured) -> bool:
        """Whether a candidate is within the bound."""
        if self.target_ms is not None:
            return candidate.latency_ms <= self.target_ms
        return self.harm(candidate) <= (self.bound or 0) + 1e-9

    def choose(self, candidates: Sequence[C]) -> tuple[C, str]:
        """The best candidate and the reason. The first candidate is the unchanged model."""
        unchanged, faster = candidates[0], [c for c in candidates if c.faster]
        fitting = [c for c in faster if self.fits(c)]
        if self.target_ms is not None:
            return self._within_time(unchanged, faster, fitting)
        bound = self.bound_text()
        if fitting:
            return max(fitting, key=lambda c: c.speedup), f"the fastest candidate with {bound}"
        nothing = f"no candidate with {bound}" if faster else "no candidate"
        return unchanged, f"{nothing} is significantly faster than the unchanged model"

    def _within_time(self, unchanged: C, faster: Sequence[C], fitting: Sequence[C]) -> tuple[C, str]:
        target = f"{self.target_ms:g} ms"
        if self.fits(unchanged):
            return unchanged, f"the unchanged model takes no more than {target}"
        if fitting:
            best = min(fitting, key=lambda c: (c.likely_drop, -c.speedup))
            return best, f"the candidate with the smallest {self.drop} within {target}"
        if faster:
            return max(faster, key=lambda c: c.speedup), f"no candidate reaches {target}: this is the fastest"
        return unchanged, f"no candidate reaches {target} or is significantly faster than the unchanged model"

    def doubt(self, fresh: Judgement, images: int, available: int = 0) -> str:
        """What the fresh images say against the choice; empty if they confirm it.

        Args:
            fresh: the judgement of the choice.
            images: the number of images in total.
            available: the number of fresh images, of which a short budget allows to judge a part.
        """
        bound, drop = self.bound, f"{self.drop} is at most {points_text(self.max_drop or 0)}"
        if self.min_agreement is not None:
            drop = f"top-1 agreement is at least {100 * self.min_agreement:g} %"
            other, (worst, best) = 100 * (1 - fresh.agreement), fresh.agreement_ci
            fresh = dataclasses.replace(
                fresh, expected_drop=other, expected_drop_ci=(100 * (1 - best), 100 * (1 - worst))
            )
        low, high = fresh.expected_drop_ci
        if bound is None or high <= bound:
            return ""
        if low > bound:
            return f"on fresh images the {_exceeds(drop)}: search with more than {images}"
        needed = images_needed(fresh, bound)
        unknown = f"{fresh.images} fresh images do not show whether the {drop}"
        if needed <= available:
            return f"{unknown}; a longer budget judges more of the {available}"
        needed *= images / max(fresh.images, available)
        enough = f"about {float(f'{needed:.1g}'):,.0f} images in total are needed"
        enough = enough if needed < 1e6 else "a million images are not enough"
        return f"{unknown}; {enough}"


def _exceeds(bound: str) -> str:
    return bound.replace("is at most", "exceeds").replace("is at least", "is below")


def points_text(count: float) -> str:
    return f"{count:g} percentage point{'s' if count != 1 else ''}"
