"""Runtimes by name: whatever can run a model. PyTorch's two are here; others are registered by those who know them.

eager     PyTorch, as the model is written
compile   torch.compile
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..errors import UserError, unknown
from .clock import Call

#: A model and the images it is to be called with → the call.
Prepare = Callable[[nn.Module, Tensor], Call]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """`prepare` may take long; the call it gives is what is timed. `unavailable` says why not here, or nothing."""

    name: str
    prepare: Prepare
    unavailable: Callable[[], str] = lambda: ""


_RUNTIMES: dict[str, Runtime] = {}


def register_runtime(runtime: Runtime) -> None:
    _RUNTIMES[runtime.name] = runtime


def runtime_names() -> list[str]:
    return list(_RUNTIMES)


def find_runtimes(names: Sequence[str]) -> list[Runtime]:
    """The runtimes of these names, each once; the error says which exist, or why one cannot be used here."""
    found = []
    for name in dict.fromkeys(names):
        if name not in _RUNTIMES:
            raise unknown("runtime", name, _RUNTIMES)
        if why := _RUNTIMES[name].unavailable():
            raise UserError(f"runtime {name}: {why}")
        found.append(_RUNTIMES[name])
    return found


def _eager(model: Callable[[Tensor], object], images: Tensor) -> Call:
    def forward() -> object:
        with torch.inference_mode():
            return model(images)

    return forward


def _compiled(model: nn.Module, images: Tensor) -> Call:
    return _eager(torch.compile(model, dynamic=False), images)


register_runtime(Runtime("eager", _eager))
register_runtime(Runtime("compile", _compiled))
