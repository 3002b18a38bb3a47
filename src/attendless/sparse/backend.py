"""Backends: the ways to compute an operation, each registered where it is written.

An *operation* is a function with a name: `full`, `remaining`, `foveal`, `block`, `gather`, `sparsifiner`, `merge`
(see `operations`). An *backend* computes one of them in one way: by plain PyTorch, by the compiled kernels, by
FlexAttention, by a user's own code. All backends of an operation compute the same function: which one runs
(`dispatch`) is a matter of speed alone.

A new one is a file of its own, here or in a user's plug-in, and no edit elsewhere:

    @register_backend
    class Mine(Backend):
        op, name, about = "gather", "mine", "what it does, in a few words"

        def refuses(self, case): ...                    # why it cannot compute this call, or ""
        def macs(self, case): ...                       # what it executes
        def run(self, case, q, k, v, indices, counts, *, scale, key_bias): ...

An backend that chooses keys in a step of its own calls that step `select`: the layer view of `bench` times it apart.
What it costs on this machine is found out by running it (`probe`), so nothing about speed has to be written down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ..errors import UserError
from ..plugins import remember_source


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an operation in plain values: all that decides who can compute it, and at what cost.

    `plan` is what the operation itself knows beforehand, such as a `foveal.Layout`; it can be hashed, and has `tokens`.
    """

    op: str
    plan: Any
    batch: int
    heads: int
    width: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    dropout: float = 0.0

    @property
    def dim(self) -> int:
        """Channels of all heads."""
        return self.heads * self.width


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who computes an operation, and why. It never changes what is computed."""

    backend: str
    reason: str


class Sample(NamedTuple):
    """A typical call, for measuring: `call(run)` makes it by an backend's `run`."""

    case: Case
    call: Callable[[Callable[..., Any]], object]


class Probe(NamedTuple):
    """A call to be timed: the cost line it is a point of, the multiply-accumulates executed, the call itself."""

    line: str
    macs: int
    call: Callable[[], object]


class Backend:
    """One way to compute one operation."""

    op: ClassVar[str]
    name: ClassVar[str]
    #: What it does, in a few words.
    about: ClassVar[str]
    #: Where nothing was measured, the backend of the highest standing that can compute a call does.
    standing: ClassVar[int] = 0
    #: The devices it is for; none named: all.
    devices: ClassVar[tuple[str, ...]] = ()

    def refuses(self, case: Case) -> str:
        """Why it cannot compute this call (shape, type, dropout, …); empty if it can."""
        return ""

    def macs(self, case: Case) -> int:
        """Multiply-accumulates it executes for the call, all images and heads together."""
        raise NotImplementedError(f"{type(self).__name__} does not define macs")

    def run(self, case: Case, *tensors: Any, **more: Any) -> Any:
        """Compute the operation: a tensor, or whatever else it gives."""
        raise NotImplementedError(f"{type(self).__name__} does not define run")

    def line(self, case: Case) -> str:
        """Which of its cost lines the call lies on, if it has several."""
        return ""

    def probe(self, samples: Iterable[Sample]) -> Iterator[Probe]:
        """The calls that measure its cost: of an operation's samples the first on each line that it does not refuse."""
        seen = set()
        for sample in samples:
            line = self.line(sample.case)
            if line not in seen and self.serves(sample.case.device) and not self.refuses(sample.case):
                seen.add(line)
                yield Probe(line, self.macs(sample.case), partial(sample.call, partial(self.run, sample.case)))

    def serves(self, device: str) -> bool:
        return not self.devices or device in self.devices


#: Typical calls of an operation on a grid of side × side, in a type: what backends are measured by.
Samples = Callable[[int, torch.dtype], Iterable[Sample]]
_SAMPLES: dict[str, Samples] = {}
_BACKENDS: dict[str, dict[str, Backend]] = {}
_registrations = 0
E = TypeVar("E", bound=type[Backend])


def register_backend(cls: E) -> E:
    """Class decorator: make an backend known under its `op` and `name`."""
    global _registrations
    op, name = getattr(cls, "op", None), getattr(cls, "name", None)
    if not (isinstance(op, str) and isinstance(name, str) and name.isidentifier()) or name in ("auto", "off"):
        raise UserError(f"{cls.__name__} needs class attributes `op` and `name`: words, got {op!r} and {name!r}")
    known = _BACKENDS.setdefault(op, {})
    other = type(known.get(name, cls()))
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UserError(f"backend {name!r} of {op} already exists: {other.__module__}.{other.__qualname__}")
    known[name] = cls()
    _BACKENDS[op] = dict(sorted(known.items(), key=lambda item: -item[1].standing))
    _registrations += 1
    remember_source(cls)
    return cls


def backends(op: str) -> list[Backend]:
    """Every backend of an operation, that of the highest standing first."""
    return list(_BACKENDS.get(op, {}).values())


def registrations() -> int:
    """How often an backend was registered: another number means that an answer may have changed."""
    return _registrations


def backend(op: str, name: str) -> Backend:
    return _BACKENDS[op][name]


def backend_names() -> list[str]:
    """The name of every backend of any operation."""
    return sorted({name for known in _BACKENDS.values() for name in known})


def every_backend() -> list[Backend]:
    return [backend for op in _BACKENDS for backend in backends(op)]


def sampled(op: str) -> Callable[[Samples], Samples]:
    """Decorator of the function that makes an operation's samples."""

    def note(make: Samples) -> Samples:
        _SAMPLES[op] = make
        return make

    return note


def samples(op: str, side: int, dtype: torch.dtype) -> list[Sample]:
    return list(_SAMPLES[op](side, dtype)) if op in _SAMPLES else []
