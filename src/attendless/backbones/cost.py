"""The cost of a backbone per layer, from the formulas of its modules."""

from __future__ import annotations

import dataclasses

from torch import nn

from ..attention import Choice, Grid, Macs, Spec


@dataclasses.dataclass(frozen=True)
class Layer:
    """One row of a backbone's cost: name, grid, attention (if any), MACs and parameters."""

    name: str
    grid: Grid
    macs: Macs
    params: int
    spec: Spec | None = None
    choice: Choice | None = None


def weight_macs(module: nn.Module, positions: int) -> int:
    """Multiply-accumulates of the linear layers and convolutions in `module`, each applied at `positions` positions."""
    layers = (m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d))
    return sum(positions * layer.weight.numel() for layer in layers)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
