"""UperNet checkpoints of mmsegmentation under our names: its UPerHead on its own Swin, on that of Swin's authors, or on
PVT v2.

Swin in mmsegmentation merges patches by `unfold`, whose channels are in another order: [C, row, column] rather than
[column, row, C]. A window on the border of a grid that it does not divide also attends to padding there, but not here
(`attention.window`), so that outputs are equal on images whose sides are multiples of 32 windows, 224 px for Swin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from ..backbones.weights import from_pyramids
from ..errors import UserError
from ..integrations.weights import load_strictly, read_weights
from .model import Dense

#: Levels that UPerHead convolves: all but the coarsest.
_LATERAL = 3


def _backwards(text: str) -> Callable[[re.Match[str]], str]:
    """mmsegmentation counts levels from the finest, our decoder from the coarsest."""
    return lambda found: text.format(_LATERAL - 1 - int(found[1]))


_HEAD: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"^decode_head\.psp_modules\.(\d)\.1\.", r"decoder.psp.blocks.\1.1."),
    (r"^decode_head\.bottleneck\.", "decoder.psp.out_conv."),
    (r"^decode_head\.lateral_convs\.(\d)\.", _backwards("decoder.fpn_lateral_blocks.{}.conv_norm_relu.")),
    (r"^decode_head\.fpn_convs\.(\d)\.", _backwards("decoder.fpn_conv_blocks.{}.")),
    (r"^decode_head\.fpn_bottleneck\.", "decoder.fusion_block."),
    (r"^decode_head\.conv_seg\.", "classify."),
    (r"^auxiliary_head\.convs\.0\.", "aux.0."),
    (r"^auxiliary_head\.conv_seg\.", "aux.2."),
    (r"^((?:decoder|aux)\..*)conv\.(?=weight|bias)", r"\g<1>0."),
    (r"^((?:decoder|aux)\..*)bn\.", r"\g<1>1."),
]
_SWIN: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"^layers\.", "stages."),
    (r"^patch_embed\.projection\.", "patch_embed.proj."),
    (r"\.attn\.w_msa\.", ".attn."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^stages\.(\d)\.downsample\.", lambda found: f"stages.{int(found[1]) + 1}.downsample."),
]


def load_mmseg(model: Dense, weights: str | Path | Mapping[str, Tensor]) -> None:
    """Load an UperNet checkpoint of mmsegmentation into `model`, in place.

    Args:
        model: An `upernet` on a Swin or PVT v2 of attendless, with as many classes as the checkpoint.
        weights: The checkpoint's file, or its state dict.

    Raises:
        UserError: a weight is missing, unexpected, or of another shape.
    """
    if model.name != "upernet":
        raise UserError(f"mmsegmentation's UPerHead does not fit the head {model.name!r}: expected 'upernet'")
    found = read_weights(weights) if isinstance(weights, str | Path) else dict(weights)
    # The backbone's last norm belongs to its classifier; no map passes through it.
    load_strictly(model, from_mmseg(found), ("features.backbone.norm.",))


def from_mmseg(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of mmsegmentation's encoder-decoder with UPerHead, under our names."""
    inner = {name.removeprefix("backbone."): value for name, value in weights.items() if name.startswith("backbone.")}
    found = {_renamed(name, _HEAD): value for name, value in weights.items() if not name.startswith("backbone.")}
    if any("relative_position_bias_table" in name for name in inner):
        for name in [name for name in inner if re.match(r"norm\d\.", name)]:
            found[f"features.make.{name[4:]}"] = inner.pop(name)
        inner = _swin(inner)
    return found | {f"features.backbone.{name}": value for name, value in from_pyramids(inner).items()}


def _swin(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    unfolded = any(".w_msa." in name for name in weights)
    found = {}
    for name, value in weights.items():
        if unfolded and ".downsample." in name:
            value = value.unflatten(-1, (-1, 2, 2)).transpose(-3, -1).flatten(-3)
        found[_renamed(name, _SWIN)] = value
    return found


def _renamed(name: str, rules: list[tuple[str, str | Callable[[re.Match[str]], str]]]) -> str:
    for pattern, text in rules:
        name = re.sub(pattern, text, name)
    return name
