"""How a search spends its time budget: how many images and candidates each step takes."""

from __future__ import annotations

import dataclasses
import math
import re
import time

from ..errors import UserError

#: Seconds of a `quick` search; with start and output the command takes about a minute.
QUICK = 50.0
#: Forward passes of the whole model that the search of token schedules and keep rates takes for each of its images.
_PASSES = 130
#: Proposals that are judged, about: of a search, and of the presets.
_PROPOSALS, _PRESETS = 20, 6
#: Forward passes of the original that running it and all files on an image takes the time of, about.
_FILES = 4
#: The most images to calibrate int8 on. The search takes its images from them.
CALIBRATION = 300
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(budget: str | float) -> float:
    """Seconds of a budget such as 15m, 90s, 1h or a number of seconds."""
    text = str(budget).strip()
    found = re.fullmatch(r"(\d{1,7}(?:\.\d+)?)(s|m|h|)", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"budget {text[:40]!r}: expected a time such as 90s, 15m or 1h")
    return seconds


@dataclasses.dataclass(frozen=True)
class Pace:
    """Shares of a budget.

    quick: whether proposals are presets rather than searched.
    calibration, search, choosing, fresh: images to calibrate int8 on, for the search, which takes them from those, for
        the choice, and for the final judgement.
    in_pytorch: those of the choice on which PyTorch runs each proposal; 0: all. Files are several times as fast.
    points: points on each curve of the search.
    candidates: changes that are prepared and timed in each of the `targets` fastest targets.
    timing: seconds of timing for each variant.
    """

    quick: bool
    calibration: int
    search: int
    choosing: int
    fresh: int
    points: int
    targets: int
    candidates: int
    timing: float
    in_pytorch: int = 0

    @classmethod
    def timing_alone(cls, timing: float) -> Pace:
        """The pace of a search whose images and candidates are given."""
        return cls(False, 0, 0, 0, 0, 0, 0, 0, timing)

    @classmethod
    def of(cls, budget: float, per_image: float, quick: bool, largest: int = 5000) -> Pace:
        """The pace for `budget` seconds, if the original model takes `per_image` seconds for an image.

        `largest`: the most images whose outputs can be held at once.
        """

        def images(share: float, passes: float, least: int, most: int) -> int:
            return min(largest, max(least, min(most, int(share * budget / (passes * per_image)))))

        if quick:
            return cls(
                quick=True,
                calibration=images(0.2, 3, 8, 64),
                search=8,
                choosing=images(0.3, _PRESETS, 32, 300),
                fresh=images(0.1, 2, 16, 300),
                points=3,
                targets=1,
                candidates=2,
                timing=max(0.2, min(1.0, budget / 60)),
            )
        return cls(
            quick=False,
            calibration=images(0.1, 3, 32, CALIBRATION),
            search=images(0.25, _PASSES, 4, 64),
            choosing=images(0.15, _FILES, 16, 1000),
            in_pytorch=images(0.2, _PROPOSALS, 16, 1000),
            fresh=images(0.1, 2, 16, 5000),
            points=6 if budget < 600 else 8,
            targets=2 if budget < 600 else 3,
            candidates=5 if budget < 600 else 7,
            timing=max(0.1, min(6.0, budget / 200)),
        )


class Deadline:
    """The end of a budget: steps that would begin after a share of it has passed are left out."""

    def __init__(self, budget: float) -> None:
        self.budget, self.began = budget, time.monotonic()

    def passed(self, share: float) -> bool:
        return time.monotonic() - self.began > share * self.budget
