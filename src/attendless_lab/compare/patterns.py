"""Attention maps of a trained model for the report: maps over the patches of one image."""

from __future__ import annotations

import base64
import dataclasses

import torch
from torch import Tensor, nn

from attendless.attention import Attention
from attendless.maps import Entry, entry, layers

#: Up to this many patches, every patch is a query; beyond, only the middle one, to limit the size of the report.
EVERY_QUERY = 256


@dataclasses.dataclass(frozen=True)
class Look:
    """One layer: for each query listed, the attention to each patch, as bytes scaled to the maximum of the row."""

    layer: int
    height: int
    width: int
    queries: list[int]
    bytes: str


@torch.no_grad()
def looks(model: nn.Module, image: Tensor) -> list[Look]:
    """The maps of the first, middle and last layer for `image` [3, h, w], averaged over heads."""
    ours = [number for number, attention in enumerate(layers(model)) if isinstance(attention, Attention)]
    chosen = sorted({ours[0], ours[len(ours) // 2], ours[-1]}) if ours else []
    found = (_look(number, entry(model, image[None], number)) for number in chosen)
    return [look for look in found if look is not None]


def _look(layer: int, given: Entry) -> Look | None:
    grid = given.context.grid
    if grid.reduced:  # its tokens are no longer on the grid
        return None
    every = grid.patches <= EVERY_QUERY
    middle = grid.height // 2 * grid.width + grid.width // 2
    queries = list(range(grid.patches)) if every else [middle]
    rows = slice(grid.prefix, None) if every else grid.prefix + middle
    map_QN = given.attention.map(given.x, given.context, rows)[0].mean(0)[:, grid.prefix :].abs().float()
    levels = (map_QN / map_QN.amax(dim=1, keepdim=True).clamp_min(1e-12) * 255).round().to(torch.uint8)
    return Look(layer, grid.height, grid.width, queries, base64.b64encode(levels.numpy().tobytes()).decode())
