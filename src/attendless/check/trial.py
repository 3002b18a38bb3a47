"""What the interface checks share: grids, tolerances, a check, its verdict, and how it is run.

A check is a function of a trial, an object that holds a module and its inputs on one grid. `check.attentions` and
`check.reducers` define the trials and the checks of their interface.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..attention import Grid
from ..errors import UserError

#: Model width and heads of every module tested: small, so that the checks are fast.
DIM, HEADS = 32, 2
#: Attributes of every `nn.Module`.
_OWN = frozenset(vars(nn.Module()))


@dataclasses.dataclass(frozen=True)
class Place:
    """A grid and a mode in which a module is tested."""

    grid: Grid
    training: bool = False

    def __str__(self) -> str:
        return f"grid {self.grid} in {'training' if self.training else 'evaluation'}"


class Trial(Protocol):
    """A module on one grid, with its inputs."""

    def computed_by(self, backend: str) -> contextlib.AbstractContextManager[None]:
        """Compute with the backend of that name; empty for the default one."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A rule of an interface: its name, the rule in a sentence, the places, the trial, and the function that raises
    if the rule does not hold.

    `once`: one place that the module serves is enough. `serve`: the module must serve at least one place. `fewer`: the
    places for backends other than the default one.
    """

    name: str
    rule: str
    places: tuple[Place, ...]
    trial: Callable[[str, Place], Trial]
    function: Callable[[Any], None]
    once: bool = False
    serve: bool = False
    fewer: tuple[Place, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a check: `refused` if the module refuses every grid it was tested on and gives a reason."""

    spec: str
    check: str
    backend: str
    result: Literal["passed", "refused", "failed"]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Broken(Exception):
    """A check that failed; the text says what was found and what was expected."""


def must(holds: object, otherwise: str) -> None:
    """Raise `Broken` with the text `otherwise` unless `holds`."""
    if not holds:
        raise Broken(otherwise)


def same(found: Tensor, expected: Tensor, what: str, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Raise `Broken` unless two tensors are equal within a tolerance."""
    must(found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not torch.allclose(found, expected, atol=atol, rtol=rtol):
        raise Broken(f"{what}: off by up to {(found - expected).abs().max().item():.2g}")


def rule(
    table: dict[str, Check], trial: Callable[[str, Place], Trial], places: tuple[Place, ...], **more: Any
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Decorator: add a check to `table` under its function's name; the docstring is the rule."""

    def note(function: Callable[[Any], None]) -> Callable[[Any], None]:
        name = function.__name__.replace("_", " ")
        table[name] = Check(name, " ".join((function.__doc__ or "").split()), places, trial, function, **more)
        return function

    return note


def attempt(check: Check, spec: str, backend: str = "") -> Verdict:
    """Run one check with the default backend, or with the one named (at the fewer places of the check)."""
    served, refusals = 0, []
    places = check.fewer if backend and check.fewer else check.places
    for place in places:
        try:
            trial = check.trial(spec, place)
        except UserError as refusal:
            if len(str(refusal)) <= 40:
                note = f"{place} is refused without saying what and why: {refusal}"
                return Verdict(spec, check.name, backend, "failed", note)
            refusals.append(str(refusal))
            continue
        except Exception as error:
            return Verdict(spec, check.name, backend, "failed", f"it cannot be built for {place}: {_told(error)}")
        try:
            with trial.computed_by(backend):
                check.function(trial)
        except Exception as error:
            return Verdict(spec, check.name, backend, "failed", f"{place}: {_told(error)}")
        served += 1
        if check.once:
            return Verdict(spec, check.name, backend, "passed")
    if served:
        note = f"{len(refusals)} of {len(places)} grids refused: {refusals[0]}" if refusals else ""
        return Verdict(spec, check.name, backend, "passed", note)
    if check.serve:
        return Verdict(spec, check.name, backend, "failed", f"it refuses every grid it was tested on: {refusals[0]}")
    return Verdict(spec, check.name, backend, "refused", refusals[0])


def _told(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, Broken) else f"{type(error).__name__}: {first}"


def changed_by(call: Callable[[], object], module: nn.Module, training: bool) -> list[str]:
    """The attributes, parameters and buffers of `module` and its children that a call changes."""
    before = _everything_on(module, training)
    call()
    after = _everything_on(module, training)
    return sorted(name for name in before.keys() | after.keys() if not _alike(before.get(name), after.get(name)))


def _everything_on(module: nn.Module, training: bool) -> dict[str, list[Any]]:
    """The attributes of a module and its children, with the version counter of each tensor."""
    found: dict[str, list[Any]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
                found[f"{path}.{name}"] = [value, *(inside if isinstance(inside, list | tuple | set) else ())]
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            found[f"{path}.{name}"] = [tensor, 0 if training else tensor._version]
    return found


def _alike(before: list[Any] | None, after: list[Any] | None) -> bool:
    if before is None or after is None or len(before) != len(after):
        return False
    return all(a is b or (isinstance(a, int) and a == b) for a, b in zip(before, after, strict=True))
