"""Our models in timm: `timm.create_model("pyramid_swin_tiny", attention="window/window/full/full")`.

Names start with the backbone, except those of LaViT and BBViT. Every model takes `attention="…"`; the default is the
attention of its authors. Models with weights on timm's hub load them with `pretrained=True`; with another attention,
the weights whose names and shapes fit.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, get_pretrained_cfg, register_model
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from .bbvit import BBViT
from .ceit import CeiT
from .columnar import Columnar
from .deepvit import DeepViT
from .lvvit import LVViT
from .pyramid import Pyramid
from .weights import fit_attention, from_pyramids

_IMAGENET = {"num_classes": 1000, "input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic"}
_LAYERS = {"first_conv": "patch_embed.proj", "classifier": "head"}
_LVVIT_LAYERS = {"first_conv": "patch_embed.conv1", "classifier": ("head", "aux_head")}
default_cfgs: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Model:
    """A backbone and its constructor's arguments; `weights` names the timm model whose weights it can load, `layers`
    its first and last layers."""

    backbone: type[nn.Module]
    arguments: dict[str, Any]
    weights: str = ""
    layers: dict[str, Any] = dataclasses.field(default_factory=lambda: _LAYERS)

    def build(self, name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
        return build_model_with_cfg(
            self.backbone,
            name,
            pretrained,
            pretrained_filter_fn=self.adapt,
            # As in timm: every stage of a hierarchical model, the last three blocks of an isotropic one.
            feature_cfg={"out_indices": len(arguments.get("depths", (1, 1, 1))), "feature_cls": "getter"},
            **{"scratch": not pretrained, **arguments},
        )

    def adapt(self, state: dict[str, Any], model: Any) -> dict[str, Any]:
        """timm's weights for `model`, whatever its attention and image size."""
        renamed = from_pyramids(state) if issubclass(self.backbone, Pyramid) else checkpoint_filter_fn(state, model)
        return fit_attention(renamed, model)


def _register(name: str, model: Model) -> None:
    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return model.build(name, pretrained, {**model.arguments, **kwargs})

    entry.__name__ = entry.__qualname__ = name
    theirs = get_pretrained_cfg(model.weights) if model.weights else None
    # Hierarchical backbones accept images of any size, unlike some of timm's.
    side = model.arguments.get("img_size", 224)
    ours = {**model.layers, "fixed_input_size": not issubclass(model.backbone, Pyramid), "input_size": (3, side, side)}
    default_cfgs[name] = {**(theirs.to_dict() if theirs else _IMAGENET), **ours}
    register_model(entry)


def _fair(patch: int, dims: tuple[int, ...], depths: tuple[int, ...], heads: tuple[int, ...]) -> dict[str, Any]:
    """The isotropic model of the fair comparison is its hierarchical model with one stage."""
    return {"patch_size": patch, "embed_dims": dims, "depths": depths, "num_heads": heads}


def _fair_pyramid(patch: int) -> dict[str, Any]:
    return _fair(patch, (96, 192, 384, 768), (2, 2, 6, 2), (3, 6, 12, 24))


def _fair_column(patch: int) -> dict[str, Any]:
    return _fair(patch, (384,), (12,), (12,))


def _swin(dim: int, depth: int, heads: int) -> dict[str, Any]:
    return {
        "attention": "window+window:shift=3",
        "embed_dims": tuple(dim * 2**i for i in range(4)),
        "depths": (2, 2, depth, 2),
        "num_heads": tuple(heads * 2**i for i in range(4)),
        "positions": "none",
        "norm_eps": 1e-5,
        "embed_eps": 1e-5,
    }


def _pvt(depths: tuple[int, ...]) -> dict[str, Any]:
    return {
        "attention": "reduced:ratio=8/reduced:ratio=4/reduced/full",
        "embed_dims": (64, 128, 320, 512),
        "depths": depths,
        "num_heads": (1, 2, 5, 8),
        "mlp_ratios": (8, 8, 4, 4),
        "embedding": "patch",
        "embed_eps": 1e-5,
    }


def _pvt_v1(*depths: int) -> dict[str, Any]:
    return {**_pvt(depths), "positions": "learned", "class_token": True}


def _pvt_v2(*depths: int, **changes: Any) -> dict[str, Any]:
    family = {"embedding": "overlap", "positions": "none", "mlp": "conv", "stage_norms": True}
    return {**_pvt(depths), **family, **changes}


def _twins_svt(dim: int, depths: tuple[int, ...], heads: int) -> dict[str, Any]:
    local = "window:bias=false"
    ratios = ("reduced:ratio=8", "reduced:ratio=4", "reduced", "full")
    return {
        "attention": "/".join(f"{local}+{ratio}" for ratio in ratios),
        "embed_dims": tuple(dim * 2**i for i in range(4)),
        "depths": depths,
        "num_heads": tuple(heads * 2**i for i in range(4)),
        "embedding": "patch",
        "positions": "conv",
        "embed_eps": 1e-5,
    }


def _twins_pcpvt(*depths: int) -> dict[str, Any]:
    return {**_pvt(depths), "positions": "conv"}


def _lvvit(dim: int, depth: int, heads: int, skip: float) -> Model:
    sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads, "mlp_ratio": 3, "skip": skip}
    return Model(
        LVViT, {**sizes, "qkv_bias": False, "norm_layer": partial(nn.LayerNorm, eps=1e-5)}, layers=_LVVIT_LAYERS
    )


def _deepvit(dim: int, depth: int, heads: int, reattending: int) -> Model:
    """Re-attention in the last layers, a stem of two convolutions, doubled branches."""
    attention = f"{depth - reattending}xfull/{reattending}xreattention:scale"
    sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads, "mlp_ratio": 3, "skip": 0.5, "kernels": (7, 3)}
    return Model(DeepViT, {**sizes, "attention": attention}, layers={**_LVVIT_LAYERS, "classifier": "head"})


def _ceit(dim: int, heads: int) -> Model:
    layers = {"first_conv": "patch_embed.conv", "classifier": "head"}
    return Model(CeiT, {"embed_dim": dim, "num_heads": heads}, layers=layers)


def _hvt(dim: int, heads: int, *depths: int) -> Model:
    """An isotropic model whose tokens are pooled between its stages, without a class token."""
    stages = len(depths)
    sizes = {"embed_dims": (dim,) * stages, "depths": depths, "num_heads": (heads,) * stages, "patch_size": 16}
    return Model(Pyramid, {**sizes, "attention": "full", "embedding": "pool", "positions": "learned"})


def _bbvit(dim: int, depth: int, size: int, patch: int, head_dim: int = 64, **changes: Any) -> Model:
    """An isotropic model of BBViT's shape: ten classes, dropout, an MLP of twice the width, mean pooling."""
    shape = {"img_size": size, "patch_size": patch, "embed_dim": dim, "depth": depth, "num_heads": dim // head_dim}
    rates = {"proj_drop_rate": 0.1, "pos_drop_rate": 0.1}
    pool = {"global_pool": "avg", "pool_include_prefix": True, "fc_norm": True}
    norm = {"norm_layer": partial(nn.LayerNorm, eps=1e-5)}
    return Model(BBViT, {"num_classes": 10, "mlp_ratio": 2, **shape, **rates, **pool, **norm, **changes})


#: The options of BBViT's released code and of its ViT.
_BIGBIRD: dict[str, Any] = {"attention": "bigbird:form=1d", "out_proj": False}
_ITS_VIT: dict[str, Any] = {"attention": "full", "qkv_bias": False, "attn_drop_rate": 0.1}
#: Dropout takes a third of a small model's step on a CPU and does not help in few epochs. Recipes can set it (`drop`).
_NO_DROPOUT: dict[str, Any] = {"proj_drop_rate": 0.0, "pos_drop_rate": 0.0}


#: For little data: a convolutional stem, and attention of channels with local patch interaction, which is linear in the
#: number of tokens. Any attention may take its place.
_STEM = {
    "attention": "xca:lpi",
    "img_size": 112,
    "patch_size": 8,
    "embed_dims": (96, 192),
    "depths": (2, 4),
    "num_heads": (3, 6),
    "mlp_ratios": 3,
    "embedding": "halving",
}


def _lavit(*depths: int, vanilla: int) -> dict[str, Any]:
    """PVT v2's skeleton; less attention in the last two stages behind `vanilla` layers of the third and one of the
    fourth, scores carried between stages. The poster specifies neither; this is our choice."""
    less = "lavit:map=dense,mix=false,dp=0.1"
    third = [*["reduced"] * vanilla, *[f"{less},ratio=2"] * (depths[2] - vanilla)]
    fourth = ["full", *[less] * (depths[3] - 1)]
    first = [*["reduced:ratio=8"] * depths[0], *["reduced:ratio=4"] * depths[1]]
    return _pvt_v2(*depths, attention="/".join([*first, *third, *fourth]), carry="grid")


#: 64 tokens and a tenth of a million parameters: for `scenes`, and for trying things within a minute. Nothing but the
#: linear head comes after the pool: a norm there would relate the patches to each other, which is attention's part.
_MICRO = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 64,
    "depth": 3,
    "num_heads": 4,
    "mlp_ratio": 2,
    "class_token": False,
    "global_pool": "avg",
    "fc_norm": False,
}

MODELS: dict[str, Model] = {
    "columnar_micro_patch4_32": Model(Columnar, _MICRO),
    "columnar_tiny_patch16_224": Model(Columnar, {"embed_dim": 192, "num_heads": 3}, "deit_tiny_patch16_224"),
    "columnar_small_patch16_224": Model(Columnar, {"embed_dim": 384, "num_heads": 6}, "deit_small_patch16_224"),
    "columnar_base_patch16_224": Model(Columnar, {"embed_dim": 768, "num_heads": 12}, "deit_base_patch16_224"),
    "columnar_lvvit_tiny": _lvvit(240, 12, 4, 1),
    "columnar_lvvit_small": _lvvit(384, 16, 6, 2),
    "columnar_lvvit_medium": _lvvit(512, 20, 8, 2),
    "columnar_deepvit_tiny": _deepvit(192, 12, 3, 4),
    "columnar_deepvit_small": _deepvit(396, 16, 12, 5),
    "columnar_ceit_tiny": _ceit(192, 3),
    "columnar_ceit_small": _ceit(384, 6),
    "columnar_hvt_tiny": _hvt(384, 6, 1, 3, 3, 3, 2),
    "columnar_hvt_small": _hvt(384, 6, 12),
    "bbvit_tiny": _bbvit(512, 3, 184, 8, **_BIGBIRD),
    "bbvit_moderate": _bbvit(1024, 6, 368, 16, **_BIGBIRD),
    "bbvit_vit_tiny": _bbvit(512, 3, 184, 8, **_ITS_VIT),
    "bbvit_vit_moderate": _bbvit(1024, 6, 368, 16, **_ITS_VIT),
    # At small scale, for studies on a CPU: 145 tokens, 29 blocks of 5.
    **{f"bbvit_w{dim}_patch6_72": _bbvit(dim, 3, 72, 6, 32, **_NO_DROPOUT) for dim in (64, 128, 256)},
    "lavit_tiny": Model(Pyramid, _lavit(2, 2, 2, 2, vanilla=1)),
    "lavit_small": Model(Pyramid, _lavit(3, 4, 6, 3, vanilla=2)),
    "lavit_base": Model(Pyramid, _lavit(3, 4, 18, 3, vanilla=2)),
    "pyramid_fair_patch4_224": Model(Pyramid, _fair_pyramid(4)),
    "pyramid_fair_patch7_224": Model(Pyramid, _fair_pyramid(7)),
    "columnar_fair_patch14_224": Model(Pyramid, _fair_column(14)),
    "columnar_fair_patch16_224": Model(Pyramid, _fair_column(16)),
    # At small scale, for studies on a CPU: patches of 4 or 8.
    "pyramid_fair_micro_64": Model(Pyramid, {**_fair(4, (32, 64, 128), (1, 1, 2), (1, 2, 4)), "img_size": 64}),
    "columnar_fair_micro_64": Model(Pyramid, {**_fair(8, (96,), (4,), (3,)), "img_size": 64}),
    "pyramid_stem_tiny": Model(Pyramid, _STEM),
    "pyramid_patch_tiny": Model(Pyramid, {**_STEM, "embedding": "patch"}),
    "pyramid_pvt_tiny": Model(Pyramid, _pvt_v1(2, 2, 2, 2)),
    "pyramid_pvt_small": Model(Pyramid, _pvt_v1(3, 4, 6, 3)),
    "pyramid_pvt_medium": Model(Pyramid, _pvt_v1(3, 4, 18, 3)),
    "pyramid_pvt_large": Model(Pyramid, _pvt_v1(3, 8, 27, 3)),
    "pyramid_pvt_v2_b0": Model(Pyramid, _pvt_v2(2, 2, 2, 2, embed_dims=(32, 64, 160, 256)), "pvt_v2_b0"),
    "pyramid_pvt_v2_b1": Model(Pyramid, _pvt_v2(2, 2, 2, 2), "pvt_v2_b1"),
    "pyramid_pvt_v2_b2": Model(Pyramid, _pvt_v2(3, 4, 6, 3), "pvt_v2_b2"),
    "pyramid_pvt_v2_b2_li": Model(
        Pyramid, _pvt_v2(3, 4, 6, 3, attention="reduced:pool=7", mlp="conv_relu"), "pvt_v2_b2_li"
    ),
    "pyramid_pvt_v2_b3": Model(Pyramid, _pvt_v2(3, 4, 18, 3), "pvt_v2_b3"),
    "pyramid_pvt_v2_b4": Model(Pyramid, _pvt_v2(3, 8, 27, 3), "pvt_v2_b4"),
    "pyramid_pvt_v2_b5": Model(Pyramid, _pvt_v2(3, 6, 40, 3, mlp_ratios=4), "pvt_v2_b5"),
    "pyramid_swin_tiny": Model(Pyramid, _swin(96, 6, 3), "swin_tiny_patch4_window7_224"),
    "pyramid_swin_small": Model(Pyramid, _swin(96, 18, 3), "swin_small_patch4_window7_224"),
    "pyramid_swin_base": Model(Pyramid, _swin(128, 18, 4), "swin_base_patch4_window7_224"),
    "pyramid_twins_pcpvt_small": Model(Pyramid, _twins_pcpvt(3, 4, 6, 3), "twins_pcpvt_small"),
    "pyramid_twins_pcpvt_base": Model(Pyramid, _twins_pcpvt(3, 4, 18, 3), "twins_pcpvt_base"),
    "pyramid_twins_pcpvt_large": Model(Pyramid, _twins_pcpvt(3, 8, 27, 3), "twins_pcpvt_large"),
    "pyramid_twins_svt_small": Model(Pyramid, _twins_svt(64, (2, 2, 10, 4), 2), "twins_svt_small"),
    "pyramid_twins_svt_base": Model(Pyramid, _twins_svt(96, (2, 2, 18, 2), 3), "twins_svt_base"),
    "pyramid_twins_svt_large": Model(Pyramid, _twins_svt(128, (2, 2, 18, 2), 4), "twins_svt_large"),
}

for _name, _model in MODELS.items():
    _register(_name, _model)
