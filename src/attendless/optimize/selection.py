"""What `optimize` tries: the changes to judge, the targets to try them in, and those that are timed in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from torch import nn

from ..attention import Spec
from ..convert.presets import PRESETS, preset
from ..integrations.discovery import find_slots
from ..measure.macs import count
from ..measure.subject import attention_of
from ..sizes import input_size
from .candidates import Change
from .proposals import Proposal, evenly_chosen, propose
from .session import Session
from .variants import EAGER, Target, Variant

#: The share of MACs in attention cores from which keep rates are searched: below it, even attention without any cost
#: would save less.
_CORE = 0.1
#: Unmodified variants in the final benchmark; twice as many others.
_FINAL = 2


def proposals(backbone: nn.Module, specs: Sequence[Spec], tokens: str, session: Session) -> list[Proposal]:
    """The changes to judge: the class-token-only last layer alone, the presets, and those that the search finds.

    A change without a prediction of its time saves nothing, by prediction; its MACs speak for it.
    """
    own, size = attention_of(backbone), input_size(backbone)
    found = [Proposal(Change(own, readout=True), 0.0)]
    if tokens != "none":
        depth = tuple(range(len(find_slots(backbone))))
        for name in PRESETS:
            mechanism, reducer = preset(name, size)
            found.append(Proposal(Change(mechanism or own, depth if mechanism else (), reducer), 0.0))
    if session.pace.quick or (not specs and tokens == "none"):
        return found
    macs = count(backbone, size)
    if specs and tokens != "none" and macs.core < _CORE * macs.total:
        session.notes.append(
            f"keep rates of {specs[0].name} were not searched: attention cores are {macs.core / macs.total:.0%} of the "
            "MACs"
        )
        specs = []
    searched, notes = propose(backbone, specs, tokens, session.goal, session.search)
    session.notes += notes
    return [*found, *searched[1:]]


def promising(session: Session) -> list[Target]:
    """The fastest targets whose unmodified model meets the goal: a change can only add to its drop."""
    unmodified = [c for c in session.outcomes() if not c.variant.change]
    bounded = session.goal.bound is not None
    fitting = [c for c in unmodified if not bounded or session.goal.fits(c)]
    return [c.target for c in sorted(fitting, key=lambda c: -c.speedup)][: session.pace.targets]


def nearest(session: Session, proposals: Sequence[Proposal], target: Target) -> list[Change]:
    """The changes to try in a target: those that should be fastest within the goal, and one just beyond it."""
    goal = session.goal
    judged = session.judgements()
    known = [one for one in proposals if Variant(one.change, EAGER) in judged]

    def harm(one: Proposal) -> float:
        judgement, typical = judged[Variant(one.change, EAGER)]
        if goal.min_agreement is not None:
            return 100 * (1 - judgement.agreement)
        return max(judgement.expected_drop, typical)

    # By the time of blocks in eager PyTorch, and by MACs, which other runtimes follow more closely.
    fewer = {
        one: -count(session.workshop.module(one.change), input_size(session.workshop.model)).total for one in known
    }
    ranked = [_by_goal(session, target, known, harm, saved) for saved in (lambda one: one.saved_ms, fewer.__getitem__)]
    turns = [one for pair in zip_longest(*ranked) for one in pair if one is not None]
    return [one.change for one in dict.fromkeys(turns)][: session.pace.candidates]


def _by_goal(
    session: Session,
    target: Target,
    known: Sequence[Proposal],
    harm: Callable[[Proposal], float],
    saved: Callable[[Proposal], float],
) -> list[Proposal]:
    """Of the changes that no other beats in both harm and saved time: those within the goal, fastest first, after one
    just beyond it."""
    front = [
        one
        for one in sorted(known, key=lambda one: (-saved(one), harm(one)))
        if not any(saved(other) >= saved(one) and harm(other) < harm(one) for other in known)
    ]
    bound = session.goal.bound
    if bound is None:
        return evenly_chosen(front, session.pace.candidates)
    at_rest = [c for c in session.outcomes() if c.target == target and not c.variant.change]
    left = bound - sum(session.goal.harm(c) for c in at_rest)
    within = [one for one in front if harm(one) <= left]
    beyond = [one for one in front if left < harm(one) <= 1.3 * left]
    return [*within[:1], *beyond[-1:], *within[1:]]


def finalists(session: Session) -> list[Variant]:
    """The fastest variants within the goal, and the fastest unmodified ones, to be timed together in one benchmark."""
    outcomes = session.outcomes()[1:]
    fitting = [c for c in outcomes if session.goal.bound is None or session.goal.fits(c)]
    ranked = sorted(fitting, key=lambda c: -c.speedup)
    unmodified = [c for c in ranked if not c.variant.change]
    changed = [c for c in ranked if c.variant.change]
    return [c.variant for c in (*unmodified[:_FINAL], *changed[: 2 * _FINAL])] if changed else []
