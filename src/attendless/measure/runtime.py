"""Runtimes by name. PyTorch's two are defined here; `attendless.export` registers the others.

eager     PyTorch, as the model is written
compile   torch.compile

A name may end in a precision: `eager-bf16`, `openvino-int8`. Without one, the precision is fp32.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, unknown
from .clock import Call
from .precision import PRECISIONS, unsupported

#: A model and the images it is to be called with, and `precision=` if it is not fp32 → the call.
Prepare = Callable[..., Call]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """`prepare` may take long; only the call that it returns is timed. `unavailable` returns the reason why the runtime
    cannot be used here, or an empty text."""

    name: str
    prepare: Prepare
    unavailable: Callable[[], str] = lambda: ""
    precisions: tuple[str, ...] = ("fp32",)


_RUNTIMES: dict[str, Runtime] = {}


def register_runtime(runtime: Runtime) -> None:
    _RUNTIMES[runtime.name] = runtime


def runtime_names() -> list[str]:
    return list(_RUNTIMES)


def find_runtimes(names: Sequence[str]) -> list[Runtime]:
    """The runtimes of these names, each once. Raises if a name does not exist or a runtime cannot be used here."""
    found = []
    for full in dict.fromkeys(names):
        name, precision = split_precision(full)
        if name not in _RUNTIMES:
            raise unknown("runtime", name, _RUNTIMES)
        runtime = _RUNTIMES[name]
        if why := runtime.unavailable() or unsupported(precision, name, runtime.precisions):
            raise UserError(f"runtime {full}: {why}")
        if precision != "fp32":
            runtime = dataclasses.replace(runtime, name=full, prepare=partial(runtime.prepare, precision=precision))
        found.append(runtime)
    return found


def in_precisions(names: Sequence[str], precisions: Sequence[str]) -> list[str]:
    """The runtimes in each of these precisions that they know, as `find_runtimes` takes them: `eager`, `openvino-int8`.

    A name or a precision that does not exist, and a precision that none of the runtimes knows, stay in, for
    `find_runtimes` to raise.
    """
    known = {name: _RUNTIMES[name].precisions if name in _RUNTIMES else tuple(precisions) for name in names}
    some = {one for one in precisions if any(one in each for each in known.values())}
    pairs = [(name, one) for name in names for one in precisions if one in known[name] or one not in some]
    return [name if one == "fp32" else f"{name}-{one}" for name, one in pairs]


def split_precision(name: str) -> tuple[str, str]:
    """The runtime and the precision in a name: `openvino-int8` → (`openvino`, `int8`)."""
    runtime, _, precision = name.rpartition("-")
    return (runtime, precision) if precision in PRECISIONS else (name, "fp32")


def _eager(model: Any, images: Tensor, precision: str = "fp32") -> Call:
    if precision == "bf16":
        model, images = copy.deepcopy(model).bfloat16(), images.bfloat16()

    def forward() -> object:
        with torch.inference_mode():
            return model(images)

    return forward


def _compiled(model: nn.Module, images: Tensor, precision: str = "fp32") -> Call:
    if precision == "bf16":
        model, images = copy.deepcopy(model).bfloat16(), images.bfloat16()
    return _eager(torch.compile(model, dynamic=False), images)


register_runtime(Runtime("eager", _eager, precisions=("fp32", "bf16")))
register_runtime(Runtime("compile", _compiled, precisions=("fp32", "bf16")))
