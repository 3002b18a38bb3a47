"""What `optimize` tries: the changes to judge, the targets to try them in, and those that are timed in the end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from ..attention import Spec
from ..convert.presets import PRESETS, preset
from ..errors import UserError
from ..integrations.discovery import find_slots
from ..measure.macs import count
from ..measure.subject import attention_of
from ..sizes import input_size
from ..tokens import NONE
from .block_runtimes import EAGER_BLOCKS, blocks_in
from .candidates import Change
from .proposals import Proposal, evenly_chosen, propose
from .schedules import why_not
from .session import Session
from .variants import EAGER, Target, Variant

#: The share of MACs in attention cores from which keep rates are searched: below it, even attention without any cost
#: would save less.
_CORE = 0.1
#: Seconds of a budget from which blocks are exported to be timed.
_LONG = 300
#: The reducer of the presets.
_REDUCER = "rank"
#: What a quick search tries beside the presets: the shares of the tokens that are left in the end.
_KEPT = (0.4, 0.6, 0.75)
#: Changes with up to so many times the harm that the goal leaves are tried too.
_BEYOND = 1.5
#: Between these, harm in a target is taken to be a multiple of that in fp32.
_FACTORS = (0.5, 4.0)
#: The most proposals of a search that are judged, and the share that they save, at least, of what the fastest saves.
_JUDGED, _SAVED = 16, 0.3
#: How proposals are named in the log.
_LOGGED = "proposals within"
#: Targets that differ by dynamic layers alone.
_ALIKE = 2
#: Unmodified variants in the final benchmark; twice as many others.
_FINAL = 2


def proposals(backbone: nn.Module, specs: Sequence[Spec], tokens: str, session: Session) -> list[Proposal]:
    """The changes to judge: the exact conversion alone, the presets, and those that the search finds.

    A change without a prediction of its time saves nothing, by prediction; its MACs speak for it.
    """
    own, size = attention_of(backbone), input_size(backbone)
    found = [Proposal(Change(own, readout=True), 0.0)]
    reducible = tokens != NONE and not why_not(backbone, _REDUCER)
    if reducible:
        depth = tuple(range(len(find_slots(backbone))))
        for name in PRESETS:
            mechanism, reducer = preset(name, size)
            found.append(Proposal(Change(mechanism or own, depth if mechanism else (), reducer), 0.0))
    if session.pace.quick:
        return list(dict.fromkeys([*found, *_known(session, own, len(find_slots(backbone)), reducible)]))
    if not specs and tokens == NONE:
        return found
    macs = count(backbone, size)
    if specs and tokens != NONE and macs.core < _CORE * macs.total:
        session.notes.append(
            f"keep rates of {specs[0].name} were not searched: attention cores are {macs.core / macs.total:.0%} of the "
            "MACs"
        )
        specs = []
    logged = session.search.log.get(
        f"{_LOGGED} {session.goal.reach:g} points of {tokens} {' '.join(map(str, specs))}",
        lambda: _searched(backbone, specs, tokens, session),
    )
    session.notes += logged["notes"]
    searched = _proposals(logged)
    if session.goal.bound is not None:  # mild changes are within the goal and slow
        least = _SAVED * max((one.saved_ms for one in searched), default=0.0)
        ranked = sorted((one for one in searched if one.saved_ms >= least), key=lambda one: one.saved_ms)
        searched = evenly_chosen(ranked, _JUDGED)
    return [*found, *searched]


def _known(session: Session, own: str, depth: int, reducible: bool) -> list[Proposal]:
    """The proposals of earlier searches of the same model; without any, schedules between the presets if tokens can be
    reduced."""
    values = session.search.log.values
    found = [one for name, logged in values.items() if name.startswith(_LOGGED) for one in _proposals(logged)]
    if found or not reducible:
        return found
    mechanism, _ = preset(next(iter(PRESETS)), input_size(session.workshop.model))
    layers = tuple(range(depth)) if mechanism else ()
    return [Proposal(Change(mechanism or own, layers, f"{_REDUCER}:keep={kept},start=2"), 0.0) for kept in _KEPT]


def _proposals(logged: dict[str, Any]) -> list[Proposal]:
    """Proposals as they were, from the log."""
    return [
        Proposal(Change(one["attention"], tuple(one["layers"]), one["tokens"], one["readout"]), saved)
        for one, saved in logged["changes"]
    ]


def _searched(backbone: nn.Module, specs: Sequence[Spec], tokens: str, session: Session) -> dict[str, Any]:
    """The proposals of a search, for the log, with notes."""
    found, notes = _propose(backbone, specs, tokens, session)
    return {"changes": [(dataclasses.asdict(one.change), one.saved_ms) for one in found[1:]], "notes": list(notes)}


def _propose(
    backbone: nn.Module, specs: Sequence[Spec], tokens: str, session: Session
) -> tuple[list[Proposal], Sequence[str]]:
    """Proposals by the time of blocks in the fastest target, or in eager PyTorch where blocks cannot be exported."""
    (target, *_) = (promising(session) if session.deadline.budget >= _LONG else []) or [EAGER]
    search = dataclasses.replace(session.search, where=blocks_in(target))
    try:
        return propose(backbone, specs, tokens, session.goal, search)
    except (UserError, RuntimeError, NotImplementedError) as error:
        if search.where is EAGER_BLOCKS:
            raise
        session.notes.append(f"blocks were timed in eager PyTorch: {str(error).splitlines()[0][:200]}")
        return propose(backbone, specs, tokens, session.goal, session.search)


def to_refine(session: Session) -> list[Target]:
    """int8 targets of OpenVINO whose layers are worth measuring: the unmodified model is faster in them than in any
    other precision."""
    if session.pace.quick:
        return []
    best = max(session.outcomes(), key=lambda c: c.speedup if not c.variant.change else 0.0).target
    return [best] if best.precision == "int8" and best.format == "openvino" else []


def promising(session: Session) -> list[Target]:
    """The fastest targets whose unmodified model meets the goal: a change can only add to its drop.

    At most two differ by dynamic layers alone, so that a change which int8 does not bear is tried in bf16 too.
    """
    unmodified = [c for c in session.outcomes() if not c.variant.change]
    bounded = session.goal.bound is not None
    fitting = [c for c in unmodified if not bounded or session.goal.fits(c)]
    found, alike = list[Target](), Counter[tuple[str, str]]()
    for target in (c.target for c in sorted(fitting, key=lambda c: -c.speedup)):
        alike[target.runtime, target.precision] += 1
        if alike[target.runtime, target.precision] <= _ALIKE:
            found.append(target)
    return found[: session.pace.targets]


def reached(session: Session, variants: Sequence[Variant]) -> bool:
    """Whether one of the variants that were tried is within the goal."""
    return any(session.goal.fits(c) for c in session.outcomes() if c.variant in variants)


def nearest(
    session: Session, proposals: Sequence[Proposal], target: Target, tried: Sequence[Change] = ()
) -> list[Change]:
    """The changes to try next in a target after `tried`: those that should be fastest within the goal, and some beyond
    it."""
    goal = session.goal
    judged = session.judgements()
    known = [one for one in proposals if Variant(one.change, EAGER) in judged]

    def harm(one: Proposal) -> float:
        judgement, typical = judged[Variant(one.change, EAGER)]
        if goal.min_agreement is not None:
            return 100 * (1 - judgement.agreement)
        return max(judgement.expected_drop, typical)

    # By the predicted time of blocks, where there is a prediction, and by MACs.
    fewer = {
        one: -count(session.workshop.module(one.change), input_size(session.workshop.model)).total for one in known
    }
    predicted: list[Callable[[Proposal], float]] = [fewer.__getitem__]
    if any(one.saved_ms for one in known):
        predicted.insert(0, lambda one: one.saved_ms)
    left = _left(session, target, {one.change: harm(one) for one in known})
    known = [one for one in known if one.change not in tried]
    ranked = [_by_goal(session, left, known, harm, saved) for saved in predicted]
    turns = [one for pair in zip_longest(*ranked) for one in pair if one is not None]
    return [one.change for one in dict.fromkeys(turns)]


def _left(session: Session, target: Target, harms: Mapping[Change, float]) -> float | None:
    """The harm of a change in fp32 with which it should just meet the goal in a target; None without a bound.

    The harms of a precision and of a change add up, until changes that were tried in the target tell how they combine.
    """
    if session.goal.bound is None:
        return None
    there = [c for c in session.outcomes() if c.target == target]
    at_rest = sum(session.goal.harm(c) for c in there if not c.variant.change)
    tried = [c for c in there if harms.get(c.variant.change, 0.0) > 0]
    alone = sum(harms[c.variant.change] for c in tried)
    added = sum(session.goal.harm(c) - at_rest for c in tried)
    factor = min(max(added / alone, _FACTORS[0]), _FACTORS[1]) if tried else 1.0
    return (session.goal.bound - at_rest) / factor


def _by_goal(
    session: Session,
    left: float | None,
    known: Sequence[Proposal],
    harm: Callable[[Proposal], float],
    saved: Callable[[Proposal], float],
) -> list[Proposal]:
    """Of the changes that no other beats in both harm and saved time: those nearest to the goal, in turns within and
    beyond it."""
    front = [
        one
        for one in sorted(known, key=lambda one: (-saved(one), harm(one)))
        if not any(saved(other) >= saved(one) and harm(other) < harm(one) for other in known)
    ]
    if left is None:
        return evenly_chosen(front, session.pace.candidates)
    within = [one for one in front if harm(one) <= left]
    beyond = [one for one in front if left < harm(one) <= _BEYOND * left]
    turns = zip_longest(within, beyond[::-1])  # harm is known from few images, and that of two changes seldom adds up
    return [one for pair in turns for one in pair if one is not None]


def finalists(session: Session) -> list[Variant]:
    """The fastest variants within the goal, and the fastest unmodified ones, to be timed together in one benchmark.

    The fastest of several short timings looks faster than it is; this benchmark gives the latency that is promised.
    """
    outcomes = session.outcomes()[1:]
    fitting = [c for c in outcomes if session.goal.bound is None or session.goal.fits(c)]
    ranked = sorted(fitting, key=lambda c: -c.speedup)
    unmodified = [c for c in ranked if not c.variant.change]
    changed = [c for c in ranked if c.variant.change]
    return [c.variant for c in (*unmodified[:_FINAL], *changed[: 2 * _FINAL])] if changed else []
