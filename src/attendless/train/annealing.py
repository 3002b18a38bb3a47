"""Gradual token reduction: sets the strength of every reducer as a function of the step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..tokens import Reducer


def strength(epoch: float, between: Sequence[float]) -> float:
    """Strength of token reduction: 0 up to the first of two epochs, 1 from the last on; 1 without epochs."""
    if not between:
        return 1.0
    first, last = between[0], between[-1]
    if epoch >= last:
        return 1.0
    return max(0.0, (epoch - first) / (last - first))


def anneal(model: nn.Module, progress: float) -> None:
    """Set the strength of every reducer in `model`."""
    for module in model.modules():
        if isinstance(module, Reducer):
            module.anneal(progress)
