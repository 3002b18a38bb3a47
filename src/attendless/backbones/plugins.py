"""Less attention in seven backbones, as in LaViT's poster, and how scores are passed where the tokens change.

ViT, DeiT    the first four layers keep full attention, the other eight have less
DeepViT      the same; the scores passed on are those before the softmax, and so before re-attention
CeiT         the same
HVT          the same; where tokens are pooled, the scores are pooled on both axes
PVT          one layer of each stage keeps its attention, the others read its scores of 49 keys, with offset maps: a
             stage of 3,136 tokens would need a Ψ of 3,136². Scores do not pass between stages
Swin         the same, in windows. Shifted windows hold other pairs of patches, so a layer that reads scores has the
             shift of the layer before it
"""

from __future__ import annotations

from typing import Any

from ..attention import expand
from .models import MODELS

#: Each backbone, tiny and small. ViT and DeiT are the same network.
PLUGINS: dict[str, tuple[str, str]] = {
    "ViT": ("columnar_tiny_patch16_224", "columnar_small_patch16_224"),
    "DeiT": ("columnar_tiny_patch16_224", "columnar_small_patch16_224"),
    "DeepViT": ("columnar_deepvit_tiny", "columnar_deepvit_small"),
    "CeiT": ("columnar_ceit_tiny", "columnar_ceit_small"),
    "HVT": ("columnar_hvt_tiny", "columnar_hvt_small"),
    "PVT": ("pyramid_pvt_tiny", "pyramid_pvt_small"),
    "Swin": ("pyramid_swin_tiny", "pyramid_swin_small"),
}
#: Number of layers of an isotropic model that keep full attention.
VANILLA = 4


def with_less(name: str, less: str = "") -> dict[str, Any]:
    """Arguments for `timm.create_model` that give a model of `PLUGINS` less attention. `less` holds further options of
    `lavit`, such as `map=dense,mix=false`."""
    given = MODELS[name].arguments
    if name.startswith("pyramid_"):
        return {"attention": "/".join(_stages(name, given["depths"], less))}
    depths = given.get("depths", (given.get("depth", 12),))
    own = expand(given.get("attention", "full"), sum(depths))
    texts = [str(spec) for spec in own[:VANILLA]]
    for spec in own[VANILLA:]:
        texts.append(_text(less, "reattend" if spec.name == "reattention" else ""))
    return {"attention": "/".join(texts), **({"carry": "grid"} if len(depths) > 1 else {})}


def _stages(name: str, depths: tuple[int, ...], less: str) -> list[str]:
    texts: list[str] = []
    for stage, depth in enumerate(depths):
        if "swin" in name:
            first, options = "window", "window=7"
        else:
            ratio = (8, 4, 2, 1)[stage]
            first = f"reduced:ratio={ratio}" if ratio > 1 else "full"
            options = f"ratio={ratio},map=offset" if "map=" not in less else f"ratio={ratio}"
        texts += [first, *[_text(less, options)] * (depth - 1)]
    return texts


def _text(*options: str) -> str:
    joined = ",".join(filter(None, options))
    return f"lavit:{joined}" if joined else "lavit"
