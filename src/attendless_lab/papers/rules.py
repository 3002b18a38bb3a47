"""The counting rules of the papers. Each rule takes a model and an image size and returns the number of operations.

All four papers count one multiply-accumulate as one FLOP; they differ in what they omit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attendless.backbones import is_backbone
from attendless.measure.macs import count, layer_costs
from attendless.sizes import input_size

TOTAL = "FLOPs: every multiply-accumulate of matrix products and convolutions"
MHSA = "MHSA: multiply-accumulates of the attention core (q·kᵀ and weights·v), without projections"
OVERALL = "overall: attention core and MLP, without qkv and output projections, patch embedding and head"
FVCORE = (
    "FLOPs, as fvcore counts: every multiply-accumulate, and five operations per element of LayerNorm and BatchNorm"
)


def total(model: nn.Module, size: int | tuple[int, int] | None = None) -> int:
    return count(model, size).total


def mhsa(model: nn.Module, size: int | tuple[int, int] | None = None) -> int:
    """MACs of attention; of our backbones, without extra outputs such as the class-token attention of a reducer."""
    if not is_backbone(model):
        return count(model, size).core
    rows = [row for row in layer_costs(model, size) if row.spec is not None]
    attentions: list[Any] = [model.get_submodule(row.name).attn for row in rows]
    return sum(attention.core_macs(row.grid) for attention, row in zip(attentions, rows, strict=True))


def overall(model: nn.Module, size: int | tuple[int, int] | None = None) -> int:
    macs = count(model, size)
    return macs.core + macs.mlp


def fvcore(model: nn.Module, size: int | tuple[int, int] | None = None) -> int:
    return count(model, size).total + 5 * normalised_elements(model, size)


def normalised_elements(model: nn.Module, size: int | tuple[int, int] | None = None) -> int:
    """The number of elements that pass through LayerNorm and BatchNorm for one image, counted in a forward pass."""
    seen: list[int] = []
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.BatchNorm2d)]
    hooks = [norm.register_forward_hook(lambda _m, _i, out: seen.append(out.numel())) for norm in norms]
    height, width = (size, size) if isinstance(size, int) else size or input_size(model)
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, height, width))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return sum(seen)
