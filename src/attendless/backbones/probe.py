"""Profiling wrappers that a forward pass may ignore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Probe:
    """A method's replacement that observes calls and returns the method's result unchanged.

    An instance set over a module's method does not change how the model computes. Any other replacement is a user's
    own computation: the model must call it, on all tokens.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


def replaced(module: nn.Module, method: str = "forward") -> bool:
    """Whether a method of `module` was replaced on the instance by something other than a `Probe`."""
    own = vars(module).get(method)
    return own is not None and not isinstance(own, Probe)
