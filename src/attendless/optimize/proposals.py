"""Proposals: the changes that are worth judging, from token schedules and from keep rates on the remaining tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from ..attention import Spec
from ..backbones import Backbone, is_backbone
from ..errors import UserError
from ..measure.subject import attention_of
from ..tokens import NONE, parse_tokens, reducers
from .block_times import block_rows
from .candidates import Change, with_tokens
from .goals import Goal
from .rates import attention_and_layers, rate_mixes
from .schedules import Schedule, schedules, space_of, why_not
from .search import Search

T = TypeVar("T")
#: The schedules that get another attention in the layers with at least this share of the tokens.
_DENSE, _MOST = 4, 0.5


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change, and the milliseconds that all blocks save with it by prediction, for the batch that is timed."""

    change: Change
    saved_ms: float


def propose(
    backbone: nn.Module, specs: Sequence[Spec], tokens: str, goal: Goal, search: Search
) -> tuple[list[Proposal], tuple[str, ...]]:
    """The unchanged model and the changes worth judging; and notes on what was not searched, with the reason."""
    notes = []
    reason = why_not(backbone, tokens) if tokens != NONE else ""
    if reason and space_of(tokens) is None:
        raise UserError(f"tokens={tokens!r}: {reason}")
    if reason:
        notes.append(f"token reduction was not searched: {reason}")
    elif tokens != NONE and space_of(tokens) is None:
        notes += _taken_as_given(tokens)
    reduce = tokens != NONE and not reason
    found = (
        schedules(backbone, tokens, search, goal.reach) if reduce and is_backbone(backbone) else [Schedule((), "", 0.0)]
    )
    attention = attention_of(backbone)
    proposals = [
        Proposal(Change(attention, (), one.tokens), found[0].ms - one.ms)
        for one in evenly_chosen(found, 2 * search.points)
    ]
    for base in bases(found, goal) if specs else ():
        if search.expired() and base.tokens:
            notes.append(f"{specs[0].name} was not tried on every schedule: the time budget was used up")
            break
        reduced = with_tokens(backbone, base.tokens) if base.tokens else backbone
        try:
            mixes = rate_mixes(reduced, specs, search, keep_slower=not reduce)
        except UserError as error:
            if not base.tokens:
                raise
            notes.append(f"{specs[0].name} was not tried together with token reduction: {error}")
            break
        if len(mixes) == 1 and not base.tokens:  # what saves no time on all tokens saves none on fewer
            notes.append(f"{specs[0].name} saves no time at this number of tokens")
            break
        for mix, saved in mixes[1:]:
            change = Change(*attention_and_layers(reduced, specs, mix), base.tokens)
            proposals.append(Proposal(change, found[0].ms - base.ms + saved))
        if not base.tokens and reduce and is_backbone(backbone):
            proposals += in_full_layers(backbone, specs, mixes[1:], found, goal)
    return proposals, tuple(notes)


def in_full_layers(
    backbone: Backbone,
    specs: Sequence[Spec],
    mixes: Sequence[tuple[list[int], float]],
    found: Sequence[Schedule],
    goal: Goal,
) -> list[Proposal]:
    """The fastest schedules within the goal, with the attention of a mix in the layers that most tokens enter.

    There a sparse attention saves most. `mixes` were searched on all tokens; nothing is measured here.
    """
    ranked = sorted(mixes, key=lambda one: one[1])
    mixes = [ranked[i] for i in sorted({len(ranked) - 1, 2 * len(ranked) // 3})] if ranked else []
    within = [one for one in found[1:] if one.drop <= (goal.bound if goal.bound is not None else goal.reach)]
    made = []
    for one in within[-_DENSE:]:
        patches = [row.grid.patches for row in block_rows(with_tokens(backbone, one.tokens))]
        layers = [i for i, count in enumerate(patches) if count >= _MOST * patches[0]]
        for mix, saved in mixes:
            part = [chosen if i in layers else 0 for i, chosen in enumerate(mix)]
            if any(part):
                change = Change(*attention_and_layers(backbone, specs, part), one.tokens)
                share = sum(map(bool, part)) / sum(map(bool, mix))
                made.append(Proposal(change, found[0].ms - one.ms + saved * share))
    return made


def _taken_as_given(tokens: str) -> list[str]:
    """A note if a reducer was given by name alone and offers no schedule to search."""
    spec = parse_tokens(tokens)
    if spec is None or tokens.strip() != spec.name:
        return []
    return [f"{spec.name} was taken with its default options: {reducers()[spec.name].not_searched}"]


def bases(found: Sequence[Schedule], goal: Goal) -> list[Schedule]:
    """The schedules on which keep rates are tried: none, the last within the goal, and one with half its damage.

    The last leaves half of the damage to the keep rates.
    """
    bound = (goal.reach - 1) / 2
    within = [one for one in found if one.drop <= bound] or [found[0]]
    if len(found) == 2:  # one schedule that the user asked for is tried whatever its drop
        within = list(found)
    half = [one for one in within if one.divergence <= within[-1].divergence / 2]
    return list(dict.fromkeys([found[0], half[-1], within[-1]]))


def evenly_chosen(found: Sequence[T], points: int) -> list[T]:
    """At most `points` of the items, evenly from the first to the last."""
    if len(found) <= points:
        return list(found)
    return [found[round(i * (len(found) - 1) / (points - 1))] for i in range(points)]


def shortlist(proposals: Sequence[Proposal], drops: Sequence[float], goal: Goal, points: int) -> list[int]:
    """The indices of at most `points` proposals that are worth timing, the unchanged model first.

    Of the proposals that no other beats in both saved time and drop, one half are those nearest to the bound, where the
    choice falls. The other half are chosen evenly from slow to fast.
    """
    if len(proposals) <= points:
        return list(range(len(proposals)))
    saved = [one.saved_ms for one in proposals]

    def beaten(i: int) -> bool:
        return any(
            (saved[k], -drops[k]) != (saved[i], -drops[i]) and saved[k] >= saved[i] and drops[k] <= drops[i]
            for k in range(len(proposals))
        )

    front = sorted((i for i in range(1, len(proposals)) if not beaten(i)), key=lambda i: saved[i])
    if goal.max_drop is None:
        return [0, *evenly_chosen(front, points - 1)]
    near = sorted(front, key=lambda i: abs(drops[i] - (goal.max_drop or 0)))[: points // 2]
    rest = [i for i in front if i not in near]
    return [0, *sorted({*near, *evenly_chosen(rest, points - 1 - len(near))})]
