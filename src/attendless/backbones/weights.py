"""Initial weights, and conversion of weights of timm's and the authors' hierarchical models to our names."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..attention import Attention
from ..attention.fitting import fitted

_logger = logging.getLogger(__name__)


def start_attentions(blocks: Iterable[Any], *, scratch: bool) -> None:
    """Prepare the attention of every block; with `scratch`, initialise its own weights as its authors do.

    Branches inside an attention, such as XCiT's local patch interaction, get the stochastic depth of the block.
    """
    for block in blocks:
        for branch in block.attn.modules():
            if isinstance(branch, DropPath):
                branch.drop_prob = getattr(block.drop_path1, "drop_prob", 0.0)
        if scratch:
            block.attn.init_weights()


def start_convolutions(model: nn.Module) -> None:
    """Initialise every convolution from N(0, 2 / fan out) with zero bias, as PVT v2 and Twins do (and timm's versions).

    The fan out of a convolution in groups is that of one group: k² · outputs / groups.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = math.prod(layer.kernel_size) * layer.out_channels // layer.groups
            nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


#: Pattern in a foreign key → our text for it. A key goes through all of them in order.
_RENAMES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    # Swin (timm)
    (r"^layers\.", "stages."),
    (r"^head\.fc\.", "head."),
    # Twins (timm)
    (r"^patch_embeds\.0\.", "patch_embed."),
    (r"^patch_embeds\.(\d+)\.", r"stages.\1.downsample."),
    (r"^blocks\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"^pos_block\.(\d+)\.proj\.0\.", r"stages.\1.conv_positions.conv."),
    # PVT v1 and v2 (the authors')
    (r"^patch_embed1\.", "patch_embed."),
    (r"^patch_embed(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.downsample."),
    (r"^pos_embed(\d)$", lambda m: f"stages.{int(m[1]) - 1}.positions.pos_embed"),
    (r"^cls_token$", "stages.3.positions.cls_token"),
    (r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks."),
    (r"^norm(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.norm."),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    # Spatial reduction (PVT, Twins): in our interface `norm` is the norm of the output.
    (r"\.attn\.norm\.", ".attn.sr_norm."),
]
#: Computed from the grid, not stored.
_DERIVED = re.compile(r"(relative_position_index|attn_mask)$")


def from_pyramids(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rename the keys of a state dict of timm's PVT v2, Swin or Twins, or of PVT's authors; our keys do not change."""
    state = state.get("model", state.get("state_dict", state))
    ours: dict[str, Tensor] = {}
    for name, value in state.items():
        for pattern, text in _RENAMES:
            name = re.sub(pattern, text, name)
        if not _DERIVED.search(name):
            ours[name] = value
    # Our qkv layer is fused; theirs has separate q and kv layers.
    for name in [name for name in ours if ".attn.q." in name]:
        q, kv = ours.pop(name), ours.pop(name.replace(".attn.q.", ".attn.kv."))
        ours[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([q, kv])
    return ours


def fit_attention(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Adapt the attention weights in `state` to `model`, which may have another attention.

    Weights that fit by name and shape are used; other weights of an attention keep their initial values. Weights
    outside attentions are not changed, so strict loading still detects every other difference.
    """
    own = {name: value for name, value in model.state_dict().items() if ".attn." in name}
    state = dict(state)
    for place, attention in model.named_modules():
        if isinstance(attention, Attention):
            theirs = {name: value for name, value in state.items() if name.startswith(f"{place}.qkv.")}
            fit = fitted(attention, {name.removeprefix(f"{place}."): value for name, value in theirs.items()})
            state |= {f"{place}.{name}": value for name, value in fit.items()}
    taken = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    kept = [name for name in own if name not in taken]
    if kept:
        _logger.warning(
            "%d weights of the attention were not found and keep their initial values, such as %s", len(kept), kept[0]
        )
    return {**{name: value for name, value in state.items() if ".attn." not in name}, **own, **taken}
