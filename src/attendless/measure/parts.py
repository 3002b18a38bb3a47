"""Latency per part of a forward pass.

During the measurement, the methods that begin and end a part are replaced on the model's instances by methods that
record the time; afterwards the replacements are removed. An interval between two marks belongs to the innermost open
part, so the parts of one run sum to that run, and nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attention import Attention
from ..backbones.probe import Probe
from ..sparse.backend import every_backend

#: In reading order. `selection` is the selection of keys by an attention, or of tokens by a reducer; `core` everything
#: else between the projections; `other` the remainder: residual additions, layer scale, Python.
PARTS = ("embedding", "selection", "core", "projections", "mlp", "norms", "head", "other")

# Last names of modules, as timm and our backbones use them.
_MODULES = {
    "patch_embed": "embedding",
    "downsample": "embedding",
    "mlp": "mlp",
    "ffn": "mlp",
    "reducer": "selection",
    "head": "head",
    "head_dist": "head",
}
_METHODS = {"_pos_embed": "embedding", "forward_head": "head"}
_PROJECTIONS = ("qkv", "q", "k", "v", "kv", "proj")

#: A method to time: an object, the name of its method, the part of the method.
Place = tuple[Any, str, str]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Milliseconds of each part of an instrumented forward pass, and of the whole pass without instrumentation."""

    ms: Mapping[str, float]
    whole_ms: float
    #: The whole forward pass, as timed between the instrumented ones.
    as_measured_ms: float

    def scaled(self, whole_ms: float) -> Parts:
        """The same shares of a forward pass of `whole_ms`: parts are timed after the latency, when the machine may be
        faster or slower."""
        ratio = whole_ms / self.whole_ms
        return Parts({name: ratio * ms for name, ms in self.ms.items()}, whole_ms, self.as_measured_ms)


def parts(model: nn.Module, images: Tensor, *, budget: float = 5.0, rounds: int = 8) -> Parts:
    """Time the parts of a forward. Plain and instrumented runs alternate, and the middle half of each is averaged."""
    plain: list[dict[str, float]] = []
    marked: list[dict[str, float]] = []
    start = time.perf_counter()
    with torch.inference_mode():
        run(model, images, [])
        while len(plain) < rounds or (time.perf_counter() - start < budget and len(plain) < 10 * rounds):
            plain.append(run(model, images, []))
            marked.append(run(model, images, places(model)))
    means = {name: 1e3 * seconds for name, seconds in _middle(marked).items()}
    whole = 1e3 * sum(_middle(plain).values())
    return Parts(means, whole, whole)


def run(model: nn.Module, images: Tensor, where: list[Place]) -> dict[str, float]:
    """Seconds of each part of one forward."""
    marks = _Marks(images.device)
    with shadowed(where, marks):
        marks.around("other", model)(images)
    return marks.seconds()


def places(model: nn.Module) -> list[Place]:
    """Every method of a model that begins a part."""
    found: list[Place] = [(model, name, part) for name, part in _METHODS.items() if hasattr(model, name)]
    return [*found, *_walk(model), *_selections()]


def _walk(module: nn.Module) -> Iterator[Place]:
    for name, child in module.named_children():
        if isinstance(child, Attention) or name == "attn" or type(child).__name__.endswith("Attention"):
            yield from _attention(child)
        elif name in _MODULES:
            yield child, "forward", _MODULES[name]
        elif "Norm" in type(child).__name__:
            yield child, "forward", "norms"
        else:
            yield from _walk(child)


def _attention(attn: nn.Module) -> Iterator[Place]:
    """One rule for every attention, timm's and ours: what neither projects nor selects is core."""
    yield attn, "forward", "core"
    for name in getattr(attn, "selection", ()):
        yield attn, name, "selection"
    if isinstance(attn, Attention):
        yield attn, "project_prefix", "projections"
    for name, child in attn.named_modules():
        if name.rsplit(".", 1)[-1] in _PROJECTIONS and isinstance(child, nn.Linear | nn.Conv2d):
            yield child, "forward", "projections"


def _selections() -> Iterator[Place]:
    """Backends that select keys in a separate step; if selection and attention are one step, all of it is core."""
    for backend in every_backend():
        if callable(getattr(backend, "select", None)):
            yield backend, "select", "selection"


class _Marks:
    """A log of marks, each with the part that was open up to it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.open: list[str] = []
        self.log: list[tuple[str, Any]] = []

    def mark(self) -> None:
        now: Any = time.perf_counter()
        if self.device.type != "cpu":
            now = torch.Event(device=self.device, enable_timing=True)
            now.record()
        self.log.append((self.open[-1] if self.open else "", now))

    def around(self, part: str, method: Callable[..., Any]) -> Probe:
        return _Timed(method, part, self)

    def seconds(self) -> dict[str, float]:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        found = Counter(dict.fromkeys(PARTS, 0.0))
        for (_, before), (part, now) in zip(self.log, self.log[1:], strict=False):
            found[part] += now - before if self.device.type == "cpu" else before.elapsed_time(now) / 1e3
        return dict(found)


class _Timed(Probe):
    """A probe that marks where a part begins and ends."""

    def __init__(self, method: Callable[..., Any], part: str, marks: _Marks) -> None:
        super().__init__(method)
        self.part, self.marks = part, marks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.marks.mark()
        self.marks.open.append(self.part)
        try:
            return self.method(*args, **kwargs)
        finally:
            self.marks.mark()
            self.marks.open.pop()


@contextlib.contextmanager
def shadowed(where: list[Place], marks: _Marks) -> Iterator[None]:
    """Replace methods on their instances, and restore them afterwards."""
    before = [(thing, method, vars(thing).get(method)) for thing, method, _ in where]
    try:
        for thing, method, part in where:
            setattr(thing, method, marks.around(part, getattr(thing, method)))
        yield
    finally:
        for thing, method, own in reversed(before):
            if method in vars(thing):
                delattr(thing, method)
            if own is not None:  # the instance already had a replaced method
                setattr(thing, method, own)


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every part over the half of the runs whose totals lie in the middle."""
    runs = sorted(runs, key=lambda run: sum(run.values()))
    quarter = len(runs) // 4
    runs = runs[quarter : len(runs) - quarter]
    return {name: float(np.mean([run[name] for run in runs])) for name in PARTS}
