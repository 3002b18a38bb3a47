"""Run the interface checks of an attention or a token reducer, ours or a plug-in's.

    for verdict in check("neighbours:radius=1"):
        print(verdict.check, verdict.result, verdict.note)

The test suite runs the same checks on everything that comes with attendless.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..attention import parse
from ..tokens import parse_tokens, reducers
from . import attentions
from . import reducers as reducing
from .trial import Check, Verdict, attempt


def check(spec: str) -> Iterator[Verdict]:
    """Run the interface checks of an attention or a token reducer, and yield each verdict as soon as it is known.

    An attention that calls one of the `sparse` operations is checked once for each backend that can compute it.

    Args:
        spec: Name and options of an attention or a reducer, such as `foveal:keep=0.1` or `tome:r=8`.
    """
    for rule, backend in plan(spec):
        yield attempt(rule, spec, backend)


def plan(spec: str) -> list[tuple[Check, str]]:
    """The checks to run and the backend of each; empty for the default backend."""
    if is_reducer(spec):
        parse_tokens(spec)
        return [(rule, "") for rule in reducing.CHECKS.values()]
    parse(spec)
    return [(rule, backend) for backend in ("", *attentions.others(spec)) for rule in attentions.CHECKS.values()]


def is_reducer(spec: str) -> bool:
    """Whether a spec names a token reducer."""
    return spec.partition(":")[0].strip() in reducers()
