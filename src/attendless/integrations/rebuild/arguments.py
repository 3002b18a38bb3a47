"""Read the constructor arguments of a model from its modules, as plain data."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm.layers
from timm.models.vision_transformer import Attention as TimmAttention
from timm.models.vision_transformer import Block as TimmBlock
from torch import nn

from ...attention import Attention
from ...backbones.block import Block
from ...backbones.ceit import LocalBlock, LocalMlp, PooledStem
from ...backbones.class_token_tail import ClassTokenTail
from ...backbones.positions import FourierPositions, LearnedPositions
from ...backbones.stem import HalvingEmbed, Merge
from ...backbones.stemmed import ConvStem
from ...errors import UserError
from ..user_code import check_projections

_HOMES: dict[str, Any] = {"nn": nn, "timm": timm.layers}


def column(model: Any) -> dict[str, Any]:
    """The arguments of `VisionTransformer` and of `Columnar`."""
    _check_parts(model)
    patch, block = model.patch_embed, model.blocks[0]
    attn, mlp = block.attn, block.mlp
    return {
        "img_size": list(patch.img_size),
        "patch_size": list(patch.patch_size),
        "in_chans": patch.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": attn.num_heads,
        "mlp_ratio": ratio(mlp.fc1.out_features if hasattr(mlp, "fc1") else mlp.fc1_g.out_features, model.embed_dim),
        "qkv_bias": attn.qkv.bias is not None,
        "qk_norm": _present(attn.q_norm),
        "scale_attn_norm": _present(attn.norm),
        "scale_mlp_norm": _present(getattr(mlp, "norm", nn.Identity())),
        "proj_bias": getattr(attn.proj, "bias", None) is not None,
        # Whether there is a LayerScale; its values are weights.
        "init_values": getattr(block.ls1, "init_values", 1e-5) if _present(block.ls1) else None,
        "class_token": model.cls_token is not None,
        "pos_embed": "none" if model.pos_embed is None else "learn",
        "no_embed_class": model.no_embed_class,
        "reg_tokens": model.num_reg_tokens,
        "pre_norm": _present(model.norm_pre),
        "final_norm": _present(model.norm) or _present(model.fc_norm),
        "fc_norm": _present(model.fc_norm),
        "pool_include_prefix": model.pool_include_prefix,
        "dynamic_img_size": model.dynamic_img_size,
        "dynamic_img_pad": patch.dynamic_img_pad,
        "drop_rate": model.head_drop.p,
        "pos_drop_rate": model.pos_drop.p,
        "proj_drop_rate": attn.proj_drop.p,
        "attn_drop_rate": attn.attn_drop.p,
        "drop_path_rate": getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0),
        "norm_layer": layer_text(block.norm1),
        "embed_norm_layer": layer_text(patch.norm) if _present(patch.norm) else None,
        "act_layer": layer_text(mlp.act if hasattr(mlp, "act") else nn.GELU()),
        "mlp_layer": "timm.Mlp" if isinstance(mlp, LocalMlp) else layer_text(mlp),
    }


def stemmed(model: Any) -> dict[str, Any]:
    """The arguments of `Stemmed` and `LVViT`."""
    stem = model.patch_embed
    own = {"in_chans": stem.conv1.in_channels, "stem": model.stem, "kernels": list(stem.kernels), "skip": model.skip}
    return {**column(model), "init_values": None, **own}


def deepvit(model: Any) -> dict[str, Any]:
    """The arguments of `DeepViT`, whose blocks change the epsilon of their norms."""
    return {**stemmed(model), "norm_layer": layer_text(model.norm if _present(model.norm) else model.fc_norm)}


def bbvit(model: Any) -> dict[str, Any]:
    """The arguments of `BBViT`."""
    # In timm, `proj_bias` and `proj_drop_rate` also hold for the MLP; the output projection may be absent.
    mlp = model.blocks[0].mlp
    shared = {"proj_bias": mlp.fc2.bias is not None, "proj_drop_rate": mlp.drop2.p}
    return {**column(model), **shared, "out_proj": model.out_proj}


def ceit(model: Any) -> dict[str, Any]:
    """The arguments of `CeiT`."""
    return {**column(model), "in_chans": model.patch_embed.conv.in_channels, "stem": model.stem}


def pyramid(model: Any) -> dict[str, Any]:
    """The arguments of `Pyramid`."""
    patch, stages, block = model.patch_embed, list(model.stages), model.stages[0].blocks[0]
    firsts = [stage.blocks[0] for stage in stages]
    return {
        "img_size": list(patch.img_size),
        "patch_size": patch.stride,
        "in_chans": model.in_chans,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dims": [first.attn.dim for first in firsts],
        "depths": [len(stage.blocks) for stage in stages],
        "num_heads": [first.attn.num_heads for first in firsts],
        "mlp_ratios": [ratio(first.mlp.fc1.out_features, first.attn.dim) for first in firsts],
        "drop_rate": model.head_drop.p,
        "drop_path_rate": getattr(stages[-1].blocks[-1].drop_path1, "drop_prob", 0.0),
        "embedding": _embedding(model),
        "positions": _positions(stages[0]),
        "mlp": _mlp(block.mlp),
        "class_token": model.num_prefix_tokens > 0,
        "stage_norms": _present(stages[0].norm),
        "qkv_bias": block.attn.qkv.bias is not None,
        "norm_eps": block.norm1.eps,
        "embed_eps": getattr(patch.norm, "eps", model.style.embed_eps),
        "carry": model.style.carry,
        "proj_drop_rate": block.attn.proj_drop.p,
        "attn_drop_rate": block.attn.attn_drop.p,
    }


def _embedding(model: Any) -> str:
    if isinstance(model.patch_embed, HalvingEmbed):
        return "halving"
    if model.patch_embed.overlap:
        return "overlap"
    if not _present(model.patch_embed.norm):
        return "pool"
    # With one stage, `merge` and `patch` are the same.
    return "merge" if all(isinstance(stage.downsample, Merge) for stage in model.stages[1:]) else "patch"


def _positions(stage: Any) -> str:
    if isinstance(stage.positions, FourierPositions):
        return "fourier"
    if isinstance(stage.positions, LearnedPositions):
        return "learned"
    return "none" if stage.conv_positions is None else "conv"


def _mlp(mlp: Any) -> str:
    if not hasattr(mlp, "dwconv"):
        return "plain"
    return "conv_relu" if isinstance(mlp.relu, nn.ReLU) else "conv"


def _check_parts(model: Any) -> None:
    """Raise for parts whose forward may differ though their weights have the same shapes."""
    if type(model.patch_embed) not in (timm.layers.PatchEmbed, ConvStem, PooledStem):
        raise UserError(
            f"patch embedding {type(model.patch_embed).__name__} is not supported: only timm's PatchEmbed is"
        )
    if not model.blocks:
        raise UserError("the model has no blocks")
    for i, block in enumerate(model.blocks):
        if type(block) not in (TimmBlock, Block, ClassTokenTail, LocalBlock):
            raise UserError(f"blocks.{i} is a {type(block).__name__}: only timm's pre-norm Block is supported")
        if type(block.attn) is not TimmAttention and not isinstance(block.attn, Attention):
            raise UserError(f"blocks.{i}.attn is a {type(block.attn).__name__}: only timm's Attention is supported")
        check_projections(block.attn, f"blocks.{i}.attn")


def _present(module: nn.Module) -> bool:
    return not isinstance(module, nn.Identity)


def ratio(hidden: int, dim: int) -> float:
    """A ratio for which timm's `int(dim * ratio)` is `hidden`."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim


def layer_text(module: nn.Module) -> str:
    """The text of a layer's class, with the eps of a norm: `nn.GELU`, `timm.LayerNorm:eps=1e-06`."""
    cls = type(module)
    if cls is timm.layers.GluMlp and not module.gate_last:
        return "timm.SwiGLUPacked"
    home = next((h for h, place in _HOMES.items() if getattr(place, cls.__name__, None) is cls), None)
    if home is None:
        raise UserError(
            f"layer type {cls.__module__}.{cls.__name__} is not supported: expected one of torch's or timm's"
        )
    return f"{home}.{cls.__name__}" + (f":eps={module.eps!r}" if hasattr(module, "eps") else "")


def layer(text: str | None) -> Any:
    """The inverse of `layer_text`; returns a constructor."""
    if text is None:
        return None
    path, _, eps = text.partition(":eps=")
    home, _, name = path.partition(".")
    cls: Any = getattr(_HOMES.get(home), name, None)
    made = cls.func if isinstance(cls, partial) else cls
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise UserError(f"layer {text!r} does not exist in this version of torch or timm {timm.__version__}")
    return partial(cls, eps=float(eps)) if eps else cls
