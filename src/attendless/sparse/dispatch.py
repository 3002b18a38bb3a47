"""Which backend computes a call, and why. The choice changes the speed of a call, never its function.

The execution policy says how to choose:

    auto    the backend with the lowest estimated latency, if costs were measured on this machine (`calibration`;
            `convert` measures them once, in seconds); otherwise the backend of the highest standing. The default
    off     always the backend of the highest standing: nothing is measured, and the break-even test of `convert`
            counts multiply-accumulates
    NAME    that backend (native, torch, flex, a user's own) wherever it can compute the call

The policy is a context variable: `execution` sets it inside a `with` block, for the calling thread only. Each thread
starts with the policy of the environment variable `ATTENDLESS_CHOOSE`, which is read once. `carried` takes the policy
into a function that runs later, or in another thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import UserError, unknown
from . import calibration
from .backend import Backend, Case, Choice, backend, backend_names, backends, registrations
from .full import Whole

SWITCH = "ATTENDLESS_CHOOSE"
_policy: ContextVar[str] = ContextVar("attendless_execution_policy", default=os.environ.get(SWITCH) or "auto")
P = ParamSpec("P")
R = TypeVar("R")


def policy() -> str:
    """The execution policy of the calling thread."""
    return _policy.get()


@contextlib.contextmanager
def execution(policy: str) -> Iterator[None]:
    """Set the execution policy inside a `with` block. Other threads keep their own policy.

    A graph that was compiled before keeps the backend that it was traced with.

    Args:
        policy: `auto`, `off` or the name of a backend.
    """
    _check(policy, "execution policy")
    before = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(before)


def carried(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with the present policy, whenever and in whichever thread it is called.

    Gradient checkpointing runs a layer again in the backward pass: outside the `with` block of the forward pass, and,
    on a GPU, in a thread of PyTorch's. A compiler reads `function` as it is: a graph holds its backends.
    """
    if compiling():
        return function
    here = policy()

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with execution(here):
            return function(*args, **kwargs)

    return call


def _check(asked: str, what: str) -> None:
    if asked not in ("auto", "off", *backend_names()):
        raise unknown(what, asked, ("auto", "off", *backend_names()))


def choose(case: Case) -> Choice:
    """The backend that computes `case`, and the reason."""
    asked = policy()
    edition = calibration.edition() if asked == "auto" else 0
    return _choose(case, asked, torch.get_num_threads(), edition, registrations())


@lru_cache(maxsize=4096)
def _choose(case: Case, asked: str, threads: int, edition: int, known: int) -> Choice:
    """`edition` and `known` are cache keys: they change whenever the result might."""
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
            return _fastest(seconds, threads)
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


def _fastest(seconds: dict[str, float], threads: int) -> Choice:
    best, *others = sorted(seconds, key=seconds.__getitem__)
    rest = ", ".join(f"{name} {milliseconds(seconds[name])}" for name in others)
    return Choice(best, f"{milliseconds(seconds[best])} estimated, {rest}, on {threads_text(threads)}")


def _listed(refusals: dict[str, str]) -> str:
    return "; ".join(f"not {name}: {reason}" for name, reason in refusals.items())


def estimates(able: list[Backend], case: Case) -> dict[str, float]:
    """The estimated seconds of each backend whose cost is known."""
    found = {one.name: calibration.seconds(one, case) for one in able}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def against_full(case: Case) -> tuple[float, float] | None:
    """Estimated seconds of a call on the backend that `choose` returns, and of full attention in its place.

    None if there is no estimate: on devices other than the CPU, or with the policy `off`. The first call on a machine
    measures costs for a few seconds.
    """
    if policy() == "off" or case.device != "cpu":
        return None
    calibration.measured(case.dtype)
    op = "remaining" if case.dtype is torch.bfloat16 else "full"  # as in `attention/full.py`
    full = Case(op, Whole(case.plan.tokens), case.batch, case.heads, case.width, case.dtype)
    ours = calibration.seconds(backend(case.op, choose(case).backend), case)
    theirs = calibration.seconds(backend(op, choose(full).backend), full)
    return None if ours is None or theirs is None else (ours, theirs)


def compiling() -> bool:
    """Whether `torch.compile` traces this code. (`torch.export` runs it as Python, so a policy can be read there.)"""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def refuse_tracing(op: str) -> None:
    """Raise under `torch.jit.trace`."""
    if torch.jit.is_tracing():
        raise UserError(
            f"{op}: torch.jit.trace, which PyTorch has deprecated, cannot trace this operation; use torch.export, "
            "torch.compile or `attendless export`"
        )


def run(case: Case, *tensors: Any, **more: Any) -> Any:
    """Compute a call on the backend that `choose` returns."""
    refuse_tracing(case.op)
    if not compiling():
        return backend(case.op, choose(case).backend).run(case, *tensors, **more)
    plan = (type(case.plan), dataclasses.astuple(case.plan))
    numbers = (case.batch, case.heads, case.width)
    name = _name_in_graph(case.op, *plan, numbers, case.dtype, case.device, case.dropout)
    return backend(case.op, name).run(case, *tensors, **more)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_in_graph(
    op: str,
    kind: Any,
    plan: tuple[Any, ...],
    numbers: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    dropout: float,
) -> str:
    """The backend's name as a constant of the graph. A compiler allows only plain values as arguments here."""
    return choose(Case(op, kind(*plan), *numbers, dtype, device, dropout)).backend


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def threads_text(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"
