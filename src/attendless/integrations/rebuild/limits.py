"""Bound what a description may build, before it is built."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...errors import UserError
from .architecture import Blueprint

#: Parameters that a constructor may register for each that the model has at the end: some are replaced.
_SPARE = 4


def layers_of(plan: Blueprint) -> int:
    """The number of layers that a blueprint asks for."""
    arguments = plan.description.arguments
    depths = arguments.get("depths") or ()
    asked = [arguments.get("depth"), *(depths if isinstance(depths, list | tuple) else ())]
    return max(len(plan.attention), sum(depth for depth in asked if isinstance(depth, int)))


@contextlib.contextmanager
def at_most(count: int) -> Iterator[None]:
    """Raise if a model that this thread builds inside registers more parameters than `count` weights need."""
    thread, left = threading.get_ident(), _SPARE * count + 100

    def registered(module: nn.Module, name: str, value: Any) -> None:
        nonlocal left
        left -= threading.get_ident() == thread
        if left < 0:
            raise UserError(f"the header describes a model with more weights than the {count:,} tensors of the file")

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()
