"""The module of compiled kernels: whether it is available, and which instruction set it uses.

Importing this module does not require the kernels: `available` and `reason` give their state. The environment variable
`ATTENDLESS_NATIVE` names the instruction set to use (see `instruction_sets()`), or `off` to disable the kernels. Builds
for tests also have the instruction set `wide`, which runs the AVX-512 code on AVX2 machines.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .errors import UserError

_SWITCH = "ATTENDLESS_NATIVE"


def _load(wanted: str) -> tuple[ModuleType | None, str]:
    if wanted == "off":
        return None, f"turned off by {_SWITCH}=off"
    try:
        module = importlib.import_module("attendless._native")
    except ImportError as error:
        if "_native" not in str(error):
            return None, f"the compiled kernels do not load: {error}"
        return None, (
            "the kernels were not compiled when attendless was installed; "
            "with a C++ compiler (GCC or Clang) in place, install attendless again"
        )
    if not hasattr(module, "signatures"):
        return None, "the compiled kernels are of an older version: install attendless again"
    if wanted:
        try:
            module.use_path(wanted)
        except ValueError as error:
            raise UserError(f"{_SWITCH}={wanted}: {error}, off") from None
    return module, ""


_native, reason = _load(os.environ.get(_SWITCH, ""))
available = _native is not None


def kernels() -> Any:
    """The compiled module; raises `UserError` with the reason if it is not available."""
    if _native is None:
        raise UserError(f"the native kernels are not available: {reason}")
    return _native


def instruction_sets() -> list[str]:
    """The instruction sets the kernels were compiled for and this machine can run, best first."""
    return list(kernels().paths()) if available else []


def instruction_set() -> str | None:
    """The instruction set in use."""
    return str(kernels().path()) if available else None


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Use one instruction set inside a `with` block, in every thread of the process. For tests."""
    before = instruction_set()
    try:
        kernels().use_path(name)
        yield
    except ValueError as error:
        raise UserError(str(error)) from None
    finally:
        kernels().use_path(before)
