"""Which backend computes a call, and why. It never changes what is computed, only how soon it is there.

One policy, for the whole process, says how to choose:

    auto    the quickest by estimate, if costs were measured on this machine (`calibration`: convert does it, once, in
            seconds); otherwise the one of the highest standing. This is the default
    off     always the one of the highest standing: nothing is measured, and convert's break-even counts
            multiply-accumulates
    NAME    that backend (native, torch, flex, a user's own) wherever it can compute the call

`ATTENDLESS_CHOOSE` in the environment, read once, gives the policy a process starts with; `execution` sets another for
the length of a `with` block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from ..errors import UserError, unknown
from . import calibration
from .backend import (
    Backend,
    Case,
    Choice,
    backend,
    backend_names,
    backends,
    registrations,
)
from .full import Whole

SWITCH = "ATTENDLESS_CHOOSE"
_policy = os.environ.get(SWITCH) or "auto"


def policy() -> str:
    """The policy in force."""
    return _policy


@contextlib.contextmanager
def execution(policy: str) -> Iterator[None]:
    """Choose by another policy for a while, in every thread of the process: `auto`, `off` or an backend's name.

    A graph that was compiled before keeps the backend it was traced with.
    """
    global _policy
    _check(policy, "execution policy")
    before, _policy = _policy, policy
    try:
        yield
    finally:
        _policy = before


def _check(asked: str, what: str) -> None:
    if asked not in ("auto", "off", *backend_names()):
        raise unknown(what, asked, ("auto", "off", *backend_names()))


def choose(case: Case) -> Choice:
    """Who computes `case`, and the reason."""
    edition = calibration.edition() if _policy == "auto" else 0
    return _choose(case, _policy, torch.get_num_threads(), edition, registrations())


@lru_cache(maxsize=4096)
def _choose(case: Case, asked: str, threads: int, edition: int, known: int) -> Choice:
    """`edition` and `known` change whenever an answer might."""
    _check(asked, SWITCH)
    here = [one for one in backends(case.op) if one.serves(case.device)]
    refusals = {one.name: one.refuses(case) for one in here}
    able = [one for one in here if not refusals[one.name]]
    if not able:
        raise UserError(f"nothing computes {case.op} on {case.device}: {_listed(refusals)}")
    if asked in (one.name for one in able):
        return Choice(asked, f"asked for by {SWITCH}={asked} or execution({asked!r})")
    if asked == "auto":
        seconds = estimates(able, case)
        if len(seconds) > 1:
            return _quickest(seconds, threads)
    usual = able[0]
    passed = {one.name: refusals[one.name] for one in here[: here.index(usual)]}
    if refusals.get(asked):
        passed = {asked: refusals[asked]} | passed
    if passed:
        return Choice(usual.name, f"{usual.about}; {_listed(passed)}")
    if len(able) == 1:
        return Choice(usual.name, usual.about)
    why = "costs were not measured on this machine" if asked == "auto" else f"the policy is {asked}"
    return Choice(usual.name, f"{usual.about}: the usual choice, as {why}")


def _quickest(seconds: dict[str, float], threads: int) -> Choice:
    best, *others = sorted(seconds, key=seconds.__getitem__)
    rest = ", ".join(f"{name} {milliseconds(seconds[name])}" for name in others)
    return Choice(best, f"{milliseconds(seconds[best])} estimated, {rest}, on {threads_text(threads)}")


def _listed(refusals: dict[str, str]) -> str:
    return "; ".join(f"not {name}: {reason}" for name, reason in refusals.items())


def estimates(able: list[Backend], case: Case) -> dict[str, float]:
    """Seconds each backend should take, for those whose cost is known."""
    found = {one.name: calibration.seconds(one, case) for one in able}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def against_full(case: Case) -> tuple[float, float] | None:
    """Estimated seconds of a call, computed by whom `choose` says, and of full attention in its place.

    None where there is no estimate: off the CPU, or if the policy is `off`. The first time on a machine, this measures
    for a few seconds.
    """
    if _policy == "off" or case.device != "cpu":
        return None
    calibration.measured(case.dtype)
    full = Case("full", Whole(case.plan.tokens), case.batch, case.heads, case.width, case.dtype)
    ours = calibration.seconds(backend(case.op, choose(case).backend), case)
    theirs = calibration.seconds(backend("full", choose(full).backend), full)
    return None if ours is None or theirs is None else (ours, theirs)


def compiling() -> bool:
    """Whether a compiler reads this code; `torch.export` runs it, and may be told who computes what."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def refuse_tracing(op: str) -> None:
    if torch.jit.is_tracing():
        raise UserError(
            f"{op}: torch.jit.trace, which PyTorch gives up, does not see what is computed here; torch.export, "
            "torch.compile and `attendless export` do"
        )


def run(case: Case, *tensors: Any, **more: Any) -> Any:
    """Compute a call by whoever is chosen."""
    refuse_tracing(case.op)
    if not compiling():
        return backend(case.op, choose(case).backend).run(case, *tensors, **more)
    plan = (type(case.plan), dataclasses.astuple(case.plan))
    numbers = (case.batch, case.heads, case.width)
    name = _name_in_graph(case.op, *plan, numbers, case.dtype, case.device, case.dropout)
    return backend(case.op, name).run(case, *tensors, **more)


@torch.compiler.assume_constant_result
def _name_in_graph(
    op: str, kind: Any, plan: tuple, numbers: tuple[int, int, int], dtype: torch.dtype, device: str, dropout: float
) -> str:
    """A compiler takes the answer for a constant of the graph, so it is asked for in plain numbers and names."""
    return choose(Case(op, kind(*plan), *numbers, dtype, device, dropout)).backend


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def threads_text(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"
