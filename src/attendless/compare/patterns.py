"""What each attention of a trained model looks at, for the report: maps over the patches of one picture."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, Context

#: Up to so many patches, every patch is a query; beyond, only the middle one, or the report would grow large.
EVERY_QUERY = 256


@dataclasses.dataclass(frozen=True)
class Look:
    """One layer: for every query listed, how much of its attention each patch gets, as bytes up to the row's most."""

    layer: int
    height: int
    width: int
    queries: list[int]
    bytes: str


@torch.no_grad()
def looks(model: nn.Module, image: Tensor) -> list[Look]:
    """The first, the middle and the last layer's map for `image` [3, h, w], averaged over heads."""
    caught: list[tuple[Attention, Tensor, Context]] = []
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [a.register_forward_pre_hook(lambda m, given: caught.append((m, *given))) for a in attentions]
    try:
        model.eval()(image[None])
    finally:
        for hook in hooks:
            hook.remove()
    chosen = sorted({0, len(caught) // 2, len(caught) - 1}) if caught else []
    return [look for i in chosen if (look := _look(i, *caught[i])) is not None]


def _look(layer: int, attention: Any, x: Tensor, context: Context) -> Look | None:
    grid = context.grid
    if grid.reduced:  # its tokens no longer stand on the grid
        return None
    every = grid.patches <= EVERY_QUERY
    middle = grid.height // 2 * grid.width + grid.width // 2
    queries = list(range(grid.patches)) if every else [middle]
    map_QN = attention.map(x, context, slice(None) if every else grid.prefix + middle)[0].mean(0)
    map_QN = map_QN[-len(queries) :, grid.prefix :].abs().float()
    levels = (map_QN / map_QN.amax(dim=1, keepdim=True).clamp_min(1e-12) * 255).round().to(torch.uint8)
    return Look(layer, grid.height, grid.width, queries, base64.b64encode(levels.numpy().tobytes()).decode())
