"""Attention rollout: what the last layer's tokens go back to, layer by layer, if every layer passes on half of what it
got and mixes the other half by its map (Abnar and Zuidema, 2020).

    R ← (½ I + ½ A) R        A the layer's map, averaged over heads

Where tokens merge, a merged one goes back to the mean of what its parts did.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import Grid
from ..errors import UserError
from .entry import entries, layers, numbers, seen_by_us


@torch.no_grad()
def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """How much of each token of the last layer comes from each token of the first, [B, tokens, tokens]."""
    model = seen_by_us(model)
    if len(numbers(model, None)) < len(layers(model)):
        raise UserError("rollout goes through every layer, and some attend by timm's own: convert them")
    mixed, grid = torch.empty(0), None
    for given in entries(model, images, numbers(model, None)):
        now = given.context.grid
        if grid is None:
            mixed = torch.eye(now.tokens, device=images.device).expand(len(images), -1, -1)
        elif (grid.height, grid.width, grid.prefix) != (now.height, now.width, now.prefix):
            raise UserError(f"rollout needs one grid for all layers; layer {given.layer} of this model has another")
        elif grid is not now:
            mixed = _carried(mixed, grid, now)
        map_BNN = given.attention.map(given.x, given.context).mean(1).float()
        mixed = (mixed + map_BNN / map_BNN.sum(-1, keepdim=True).clamp_min(1e-12) @ mixed) / 2
        grid = now
    return mixed


def _carried(x: Tensor, before: Grid, now: Grid) -> Tensor:
    """Values x [B, N, C] of the tokens before → of those now, each the mean over the places it stands for."""
    P = now.prefix
    return torch.cat([x[:, :P], now.averaged(before.restore(x)[:, P:])], dim=1)
