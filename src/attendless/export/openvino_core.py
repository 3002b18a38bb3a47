"""The one OpenVINO core of this process, and the signal stack that OpenVINO replaces.

OpenVINO's CPU plugin gives the thread that loads it a stack for signal handlers, and takes it back when the plugin is
unloaded. Two plugins that are not unloaded in reverse order leave the thread with a stack that is no longer mapped, and
the next signal (a child process that ends, Ctrl-C) kills the process with a segmentation fault. Hence one core that is
never unloaded, and `signal_stack_kept` around libraries that make cores of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from . import extension
from .packages import need


@lru_cache(maxsize=1)
def core() -> Any:
    """The process's `openvino.Core`."""
    made = need("openvino", "openvino").Core()
    made.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, before any other core does
    return made


@lru_cache(maxsize=1)
def core_with_kernels() -> Any:
    """The same core, with attendless's operators from now on."""
    extension.add_to(core())
    return core()


class _Stack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextlib.contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Give this thread back the signal stack that it has now."""
    if sys.platform != "linux":
        yield
        return
    core()  # whose stack is the one to keep
    libc, kept = ctypes.CDLL(None), _Stack()
    libc.sigaltstack(None, ctypes.byref(kept))
    try:
        yield
    finally:
        gc.collect()
        libc.sigaltstack(ctypes.byref(kept), None)
