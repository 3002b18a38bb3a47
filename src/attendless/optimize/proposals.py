"""What is worth judging: which tokens to merge where, and on the tokens left what each layer attends with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..attention import Spec
from ..errors import UserError
from ..measure.subject import attention_of
from ..tokens import NONE
from . import search
from .resume_log import Notes
from .schedules import SEARCHED, Schedule, schedules, why_not
from .search import Progress
from .tradeoff import Goal


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What every layer attends with, which layers that changes, what reduces the tokens (nothing: what does already),
    and the milliseconds all blocks should take less for it, with the batch that is timed."""

    attention: str
    layers: tuple[int, ...]
    tokens: str
    saved: float


def propose(
    backbone: Any,
    specs: Sequence[Spec],
    tokens: str,
    images: Tensor,
    goal: Goal,
    batch: int,
    points: int,
    budget: float,
    notes: Notes,
    progress: Progress,
) -> tuple[list[Proposal], tuple[str, ...]]:
    """The model as it is, and what is worth judging beside it; and what could not be searched, with the reason."""
    said = []
    reason = why_not(backbone, tokens) if tokens != NONE else ""
    if reason and tokens != SEARCHED:
        raise UserError(f"tokens={tokens!r}: {reason}")
    if reason:
        said.append(f"no tokens were merged: {reason}")
    plain = Schedule((), "", 0.0)
    merging = tokens != NONE and not reason
    found = schedules(backbone, tokens, images, goal.reach, batch, budget, notes, progress) if merging else [plain]
    attention = attention_of(backbone)
    proposals = [Proposal(attention, (), one.tokens, found[0].ms - one.ms) for one in thinned(found, 2 * points)]
    for base in bases(found, goal) if specs else ():
        if base.tokens:
            backbone.set_tokens(base.tokens)
        try:
            mixes = search.mixes(backbone, specs, images, batch, points, budget, notes, progress, slower=not merging)
        except UserError as error:
            if not base.tokens:
                raise
            said.append(f"{specs[0].name} was not tried on fewer tokens: {error}")
            break
        finally:
            if base.tokens:
                backbone.set_tokens(NONE)
        for mix, saved in mixes[1:]:
            proposals.append(Proposal(*search.named(backbone, specs, mix), base.tokens, found[0].ms - base.ms + saved))
    return proposals, tuple(said)


def bases(found: Sequence[Schedule], goal: Goal) -> list[Schedule]:
    """The schedules on which attending less is tried: none, the last within the bound, and one that harms half as much,
    which leaves the other half to attending less."""
    bound = (goal.reach - 1) / 2
    within = [one for one in found if one.loss <= bound] or [found[0]]
    if len(found) == 2:  # one that was asked for is tried whatever it loses
        within = list(found)
    half = [one for one in within if one.harm <= within[-1].harm / 2]
    return list(dict.fromkeys([found[0], half[-1], within[-1]]))


def thinned(found: Sequence[Any], points: int) -> list[Any]:
    """At most so many, evenly from the first to the last."""
    if len(found) <= points:
        return list(found)
    return [found[round(i * (len(found) - 1) / (points - 1))] for i in range(points)]


def shortlist(proposals: Sequence[Proposal], drops: Sequence[float], goal: Goal, points: int) -> list[int]:
    """The places of what is worth timing, at most so many: the model as it is, and of what nothing beats in both time
    and loss (`drops`) one half nearest to the bound, where the choice falls, and one half evenly from slow to quick."""
    if len(proposals) <= points:
        return list(range(len(proposals)))

    def beaten(i: int) -> bool:
        return any(
            (proposals[k].saved, -drops[k]) != (proposals[i].saved, -drops[i])
            and proposals[k].saved >= proposals[i].saved
            and drops[k] <= drops[i]
            for k in range(len(proposals))
        )

    front = sorted((i for i in range(1, len(proposals)) if not beaten(i)), key=lambda i: proposals[i].saved)
    if goal.max_drop is None:
        return [0, *thinned(front, points - 1)]
    near = sorted(front, key=lambda i: abs(drops[i] - (goal.max_drop or 0)))[: points // 2]
    rest = [i for i in front if i not in near]
    return [0, *sorted({*near, *thinned(rest, points - 1 - len(near))})]
