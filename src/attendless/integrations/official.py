"""Weights of the authors' code for CeiT, DeepViT, HVT and DynamicViT, under our names.

LV-ViT and EViT have our names, and `backbones.weights` renames those of PVT. A name that no rule matches stays, so that
our own weights pass unchanged and loading strictly finds every other difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..backbones import CeiT, DeepViT, Pyramid

#: Pattern in a name of the authors → our text for it. A name goes through all of them in order.
Renames = list[tuple[str, str | Callable[[re.Match[str]], str]]]

_CEIT: Renames = [
    (r"^i2t\.backbone\.", "patch_embed."),
    (r"^i2t\.proj\.", "patch_embed.proj."),
    (r"\.leff\.conv1\.", ".mlp.fc1."),
    (r"\.leff\.conv2\.", ".mlp.dwconv."),
    (r"\.leff\.conv3\.", ".mlp.fc2."),
    (r"\.leff\.bn", ".mlp.bn"),
    (r"^pos_layer_embed$", "layer_attention.pos_embed"),
    (r"^lca\.feedforward\.", "layer_attention.mlp."),
    (r"^lca\.(?:attn\.)?", "layer_attention."),
]
_DEEPVIT: Renames = [
    (r"\.attn\.reatten_matrix\.", ".attn.reattn.conv."),
    (r"\.attn\.var_norm\.", ".attn.reattn.bn."),
]


def from_official(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict of the authors of `model` under our names, and with our shapes; ours is unchanged."""
    renames = _renames(model)
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        for pattern, text in renames:
            name = re.sub(pattern, text, name)
        found[name] = value
    return _ceit_shapes(found) if isinstance(model, CeiT) else found


def _renames(model: Any) -> Renames:
    renames = _predictors(model)
    if isinstance(model, CeiT):
        renames = renames + _CEIT
    if isinstance(model, DeepViT):
        renames = renames + _DEEPVIT
    if isinstance(model, Pyramid) and model.style.embedding == "pool":
        renames = renames + _hvt(model)
    return renames


def _predictors(model: Any) -> Renames:
    """DynamicViT numbers its predictors; ours are in the blocks where they work."""
    reducers = [getattr(block, "reducer", None) for block in getattr(model, "blocks", ())]
    places = [i for i, reducer in enumerate(reducers) if getattr(reducer, "name", "") == "dynamicvit"]
    return [(rf"^score_predictor\.{s}\.", f"blocks.{place}.reducer.") for s, place in enumerate(places)]


def _hvt(model: Pyramid) -> Renames:
    """HVT's blocks are in one list, and one that is pooled holds the positions after it; ours are in stages."""
    renames: Renames = [(r"^pos_embed$", "stages.0.positions.pos_embed")]
    number = 0
    for s, stage in enumerate(model.stages):
        for j, _ in enumerate(stage.blocks):
            renames.append((rf"^blocks\.{number}\.(?!pos_embed$|\d)", f"stages.{s}.blocks.{j}."))
            number += 1
        renames.append((rf"^blocks\.{number - 1}\.pos_embed$", f"stages.{s + 1}.positions.pos_embed"))
    return renames


def _ceit_shapes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """CeiT's 1 × 1 convolutions as linear layers, and q of its last attention apart from k and v."""
    found = dict(weights)
    for name, value in weights.items():
        if re.search(r"\.mlp\.fc[12]\.weight$", name) and value.ndim == 4:
            found[name] = value.flatten(1)
        elif name.startswith("layer_attention.qkv."):
            del found[name]
            width, part = value.shape[0] // 3, name.rpartition(".")[2]
            found[f"layer_attention.q.{part}"], found[f"layer_attention.kv.{part}"] = value[:width], value[width:]
    return found
