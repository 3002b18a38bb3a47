"""Backends: the implementations of each operation, registered where they are defined.

An *operation* is a function with a name: `full`, `remaining`, `foveal`, `block`, `gather`, `sparsifiner`, `merge`
(see `operations`). A *backend* implements one operation: in plain PyTorch, with the compiled kernels, with
FlexAttention, or in a user's own code. All backends of an operation compute the same function; the choice between them
(`dispatch`) affects speed only.

To add a backend, write one file, here or in a plug-in. No other file changes:

    @register_backend
    class Mine(Backend):
        op, name, about = "gather", "mine", "a short description"

        def refuses(self, case): ...                    # the reason why it cannot compute this call, or ""
        def macs(self, case): ...                       # the multiply-accumulates it executes
        def run(self, case, q, k, v, indices, counts, *, scale, key_bias): ...

A backend that selects keys in a separate step calls this step `select`: the layer view of `bench` times it separately.
The cost of a backend on this machine is measured (`probe`), so a backend states nothing about its speed.
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
    """A call of an operation in plain values: everything that decides which backends can compute it, and their cost.

    Args:
        op: Name of the operation.
        plan: What the operation knows before it sees tensors, such as a `foveal.Layout`. It is hashable and has the
            attribute `tokens`.
        batch: Number of images.
        heads: Number of heads.
        width: Width of a head.
        dtype: Element type of q, k and v.
        device: Type of their device, such as `cpu`.
        dropout: Dropout rate of the attention weights.
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
        """Channels of all heads together."""
        return self.heads * self.width


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend that computes an operation, and the reason for the choice."""

    backend: str
    reason: str


class Sample(NamedTuple):
    """A typical call, used to measure costs: `call(run)` makes the call with a backend's `run`."""

    case: Case
    call: Callable[[Callable[..., Any]], object]


class Probe(NamedTuple):
    """A call to time: the name of its cost line, the multiply-accumulates executed, and the call itself."""

    line: str
    macs: int
    call: Callable[[], object]


class Backend:
    """One implementation of one operation."""

    op: ClassVar[str]
    name: ClassVar[str]
    #: A short description.
    about: ClassVar[str]
    #: Without measured costs, the backend of the highest standing that can compute a call is chosen.
    standing: ClassVar[int] = 0
    #: The devices it supports; empty means all.
    devices: ClassVar[tuple[str, ...]] = ()

    def refuses(self, case: Case) -> str:
        """The reason why it cannot compute this call (shape, type, dropout, …); empty if it can."""
        return ""

    def macs(self, case: Case) -> int:
        """Multiply-accumulates that it executes for the call, over all images and heads."""
        raise NotImplementedError(f"{type(self).__name__} does not define macs")

    def run(self, case: Case, *tensors: Any, **more: Any) -> Any:
        """Compute the operation and return its result."""
        raise NotImplementedError(f"{type(self).__name__} does not define run")

    def line(self, case: Case) -> str:
        """The name of the cost line that the call belongs to, for a backend with several lines."""
        return ""

    def probe(self, samples: Iterable[Sample]) -> Iterator[Probe]:
        """The calls that measure its cost: for each cost line, the first of the operation's samples it can compute."""
        seen = set()
        for sample in samples:
            line = self.line(sample.case)
            if line not in seen and self.serves(sample.case.device) and not self.refuses(sample.case):
                seen.add(line)
                yield Probe(line, self.macs(sample.case), partial(sample.call, partial(self.run, sample.case)))

    def serves(self, device: str) -> bool:
        """Whether it supports a device."""
        return not self.devices or device in self.devices


#: Makes typical calls of an operation on a grid of side × side in one dtype; backends are measured on them.
Samples = Callable[[int, torch.dtype], Iterable[Sample]]
_SAMPLES: dict[str, Samples] = {}
_BACKENDS: dict[str, dict[str, Backend]] = {}
_registrations = 0
BackendType = TypeVar("BackendType", bound=type[Backend])


def register_backend(cls: BackendType) -> BackendType:
    """Class decorator: register a backend under its `op` and `name`.

    Args:
        cls: The backend's class.

    Raises:
        UserError: another backend of the operation has this name.
    """
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
    """Every backend of an operation, in descending order of standing."""
    return list(_BACKENDS.get(op, {}).values())


def registrations() -> int:
    """The number of registrations so far. Caches of choices use it as a key."""
    return _registrations


def backend(op: str, name: str) -> Backend:
    return _BACKENDS[op][name]


def backend_names() -> list[str]:
    """The name of every backend of any operation."""
    return sorted({name for known in _BACKENDS.values() for name in known})


def every_backend() -> list[Backend]:
    return [backend for op in _BACKENDS for backend in backends(op)]


def sampled(op: str) -> Callable[[Samples], Samples]:
    """Decorator: register the function that makes an operation's samples."""

    def note(make: Samples) -> Samples:
        _SAMPLES[op] = make
        return make

    return note


def samples(op: str, side: int, dtype: torch.dtype) -> list[Sample]:
    return list(_SAMPLES[op](side, dtype)) if op in _SAMPLES else []
