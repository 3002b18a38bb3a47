"""Less attention put into seven backbones, as LaViT's poster does, and how scores are carried where tokens change.

ViT, DeiT    the first four layers keep full attention, the other eight have less
DeepViT      the same; what is handed on are the scores before the softmax, so before re-attention, which follows
CeiT         the same
HVT          the same; where tokens are pooled, so are the scores, on both of their axes
PVT          one layer of each stage keeps its own, the others read its scores of 49 keys; by offset maps, because a
             stage of 3,136 tokens would want a Ψ of 3,136²; stages begin anew
Swin         the same, in windows. Windows of another shift hold other pairs of patches, so no layer of a stage is
             shifted that reads: one that is shifted stands behind one that is, or scores begin anew
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
#: Layers of a column that keep full attention.
VANILLA = 4


def with_less(name: str, less: str = "") -> dict[str, Any]:
    """The arguments that give a model of `PLUGINS` less attention, to be passed to `timm.create_model`. `less` are
    further options of it, such as `map=dense,mix=false`."""
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
