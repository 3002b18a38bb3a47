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


C = TypeVar("C", bound=Measured)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on the accuracy drop, in percentage points of top-1, or on the latency, in milliseconds per image.

    Without any bound, `max_drop` is 0.5.
    """

    max_drop: float | None = None
    target_ms: float | None = None

    def __post_init__(self) -> None:
        if self.max_drop is not None and self.target_ms is not None:
            raise UserError("give max_drop or target_ms, not both")
        if self.max_drop is None and self.target_ms is None:
            object.__setattr__(self, "max_drop", 0.5)
        if self.max_drop is not None and not 0 <= self.max_drop <= 100:
            raise UserError(f"max_drop={self.max_drop}: expected percentage points of top-1, 0 to 100")
        if self.target_ms is not None and not 0 < self.target_ms < math.inf:
            raise UserError(f"target_ms={self.target_ms}: expected milliseconds per image, more than 0")

    @property
    def reach(self) -> float:
        """The expected drop, in percentage points, above which the search drops a token schedule."""
        return 20.0 if self.max_drop is None else 2 * self.max_drop + 1

    def fits(self, candidate: Measured) -> bool:
        """Whether a candidate is within the bound."""
        if self.target_ms is not None:
            return candidate.latency_ms <= self.target_ms
        return candidate.likely_drop <= (self.max_drop or 0)

    def choose(self, candidates: Sequence[C]) -> tuple[C, str]:
        """The best candidate and the reason. The first candidate is the unchanged model."""
        unchanged, faster = candidates[0], [c for c in candidates if c.faster]
        fitting = [c for c in faster if self.fits(c)]
        if self.target_ms is not None:
            return self._within_time(unchanged, faster, fitting)
        bound = f"an expected accuracy drop of at most {points_text(self.max_drop or 0)}"
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
            return best, f"the candidate with the smallest accuracy drop within {target}"
        if faster:
            return max(faster, key=lambda c: c.speedup), f"no candidate reaches {target}: this is the fastest"
        return unchanged, f"no candidate reaches {target} or is significantly faster than the unchanged model"

    def doubt(self, fresh: Judgement, images: int) -> str:
        """What the fresh images, of `images` in total, say against the choice; empty if they confirm it."""
        bound, (low, high) = self.max_drop, fresh.expected_drop_ci
        if bound is None or high <= bound:
            return ""
        if low > bound:
            return f"on fresh images the accuracy drop exceeds {points_text(bound)}: search with more than {images}"
        needed = images_needed(fresh, bound) * images / fresh.images
        enough = f"about {float(f'{needed:.1g}'):,.0f} images in total are needed"
        enough = enough if needed < 1e6 else "a million images are not enough"
        unknown = f"{fresh.images} fresh images do not show whether the accuracy drop is at most {points_text(bound)}"
        return f"{unknown}; {enough}"


def points_text(count: float) -> str:
    return f"{count:g} percentage point{'s' if count != 1 else ''}"
