"""The judgement of the chosen variant on images that took no part in calibration, search or choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .judge import Judgement
from .measuring import read_one
from .scoring import Scoring

#: Images with a changed prediction that the report shows.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Example:
    """A preprocessed image with a changed prediction: the classes before and after, and the label if there is one."""

    image: Tensor
    before: int
    after: int
    label: int | None


@dataclasses.dataclass(frozen=True)
class Final:
    """The final judgement; top-1 of the original and of the variant in percent, if there are labels; and examples."""

    judged: Judgement
    accuracy: tuple[float, float] | None = None
    examples: tuple[Example, ...] = ()


def judge_fresh(
    answers: Callable[[Tensor], Tensor],
    run: Callable[[Tensor], Tensor],
    images: Tensor,
    scoring: Scoring,
    step: Callable[[int], None],
) -> Final:
    """Judge a variant. `step` is called with the images done, of twice as many."""
    belief = answers(images)
    step(len(images))
    scoring = scoring.against(belief)
    given, _ = read_one(run, images, belief, "the chosen variant", step, scoring.read, scoring.distance)
    judged = scoring.judge(belief, given, labelled=True)
    if scoring.metric is not None:
        return Final(judged)
    before, after = belief.argmax(-1), torch.tensor(given)
    right = scoring.top1(before), scoring.top1(after)
    changed = [int(i) for i in (before != after).nonzero()[:_SHOWN, 0]]
    labels = scoring.labels
    return Final(
        judged,
        None if right[0] is None or right[1] is None else (right[0], right[1]),
        tuple(
            Example(images[i], int(before[i]), int(after[i]), None if labels is None else int(labels[i]))
            for i in changed
        ),
    )
