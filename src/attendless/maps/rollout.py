"""Attention rollout (Abnar and Zuidema, 2020): the contribution of each input token to the tokens of the last layer.

    R ← (½ I + ½ A) R        A the layer's map, averaged over heads

A merged token has the mean contribution of its parts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import Grid
from ..errors import UserError
from .entry import entries, layers, numbers, seen_by_us


@torch.no_grad()
def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """The contribution of each token of the first layer to each token of the last, [B, tokens, tokens]."""
    model = seen_by_us(model)
    if len(numbers(model, None)) < len(layers(model)):
        raise UserError("rollout needs the maps of every layer, but some have timm's attention: convert the model")
    mixed, grid = torch.empty(0), None
    for given in entries(model, images, numbers(model, None)):
        now = given.context.grid
        if grid is None:
            mixed = torch.eye(now.tokens, device=images.device).expand(len(images), -1, -1)
        elif (grid.height, grid.width, grid.prefix) != (now.height, now.width, now.prefix):
            raise UserError(f"rollout needs the same grid in all layers; layer {given.layer} of this model has another")
        elif grid is not now:
            mixed = _carried(mixed, grid, now)
        map_BNN = given.attention.map(given.x, given.context).mean(1).float()
        mixed = (mixed + map_BNN / map_BNN.sum(-1, keepdim=True).clamp_min(1e-12) @ mixed) / 2
        grid = now
    return mixed


def _carried(x: Tensor, before: Grid, now: Grid) -> Tensor:
    """Values x [B, N, C] of the tokens before → of the tokens now, each the mean over its patches."""
    P = now.prefix
    return torch.cat([x[:, :P], now.averaged(before.restore(x)[:, P:])], dim=1)
