"""A model's architecture as plain data: what its host's constructor must be given to build it again.

A timm model does not remember its constructor's arguments, so they are read off its modules. Whether that succeeded is
not left to hope: the model is built again from the description, without memory for weights, and every leaf module and
every weight's shape is compared.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import timm.layers
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Attention as TimmAttention
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..attention import Attention, Spec
from ..backbones import Columnar, ColumnarDistilled
from ..backbones.block import Block
from ..errors import UserError, unknown

HOSTS: dict[str, type[nn.Module]] = {"columnar": Columnar, "columnar_distilled": ColumnarDistilled}
_DESCRIBED: dict[type, str] = {
    VisionTransformer: "columnar",
    Columnar: "columnar",
    VisionTransformerDistilled: "columnar_distilled",
    ColumnarDistilled: "columnar_distilled",
}


@dataclasses.dataclass(frozen=True)
class Description:
    """The name of a host and its constructor's arguments, all of them JSON."""

    host: str
    arguments: dict[str, Any]

    def build(self, attention: str | list[Spec] = "full") -> nn.Module:
        """The model with weights yet to be loaded: those of timm's are left as memory was found."""
        return self._host()(**self._arguments(), attention=attention)

    def original(self) -> nn.Module:
        """timm's own model, with its own fused attention; its weights too are yet to be loaded."""
        timms = next(cls for cls in self._host().__mro__ if cls.__module__.startswith("timm."))
        return timms(**self._arguments())

    def _host(self) -> type[nn.Module]:
        if self.host not in HOSTS:
            raise unknown("host", self.host, HOSTS)
        return HOSTS[self.host]

    def _arguments(self) -> dict[str, Any]:
        layers = {name: _layer(value) for name, value in self.arguments.items() if name.endswith("_layer")}
        return {**self.arguments, **layers, "weight_init": "skip"}


def describes(model: nn.Module) -> bool:
    return type(model) in _DESCRIBED


def describe(model: nn.Module) -> Description:
    """The description of a timm `VisionTransformer` or of one of our hosts; what cannot be described is named."""
    if not describes(model):
        known = ", ".join(sorted({cls.__name__ for cls in _DESCRIBED}))
        raise UserError(f"{type(model).__name__} is not supported: expected one of {known}")
    _check_parts(model)
    description = Description(_DESCRIBED[type(model)], _arguments(model))
    with torch.device("meta"):
        found = differences(model, description.build())
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise UserError(f"this {type(model).__name__} cannot be rebuilt: {'; '.join(found[:3])}{more}")
    return description


def differences(model: nn.Module, rebuilt: nn.Module) -> list[str]:
    """What differs between two models, part by part. Weights a mechanism adds to an attention do not count."""
    ours, theirs = _structure(model), _structure(rebuilt)
    added = {name for name in ours if ".attn." in name and name not in theirs}
    found = [
        f"{name} is {ours.get(name, 'absent')}, rebuilt as {theirs.get(name, 'absent')}"
        for name in sorted((ours.keys() - added) | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    # Values that change what a module computes without showing when it prints, such as which half of a GLU is the gate.
    twins = dict(rebuilt.named_modules())
    for name, module in model.named_modules():
        mine, other = _values(module), _values(twins[name]) if name in twins else {}
        found += [
            f"{name}.{key}={mine[key]!r}, rebuilt as {other[key]!r}"
            for key in mine.keys() & other.keys()
            if mine[key] != other[key]
        ]
    return found


def _structure(model: nn.Module) -> dict[str, str]:
    """Every leaf module as it prints (type, sizes, eps) and every weight's shape; dropout does not count."""
    leaves = {name: module for name, module in model.named_modules() if not any(module.children())}
    parts = {name: repr(leaf) for name, leaf in leaves.items() if not isinstance(leaf, _ABSENT_IN_EVAL)}
    shapes = {name: f"shaped {tuple(value.shape)}" for name, value in model.state_dict().items()}
    return parts | shapes


def _values(module: nn.Module) -> dict[str, Any]:
    """A module's public attributes that are plain values."""
    if isinstance(module, _ABSENT_IN_EVAL):
        return {}
    skip = {"training", "grad_checkpointing", "weight_init_mode", "fix_init", "distilled_training", "init_values"}
    plain = (bool, int, float, str, tuple)
    return {k: v for k, v in vars(module).items() if isinstance(v, plain) and k[0] != "_" and k not in skip}


def _check_parts(model: Any) -> None:
    """Parts whose forward differs though their weights may look alike."""
    if type(model.patch_embed) is not timm.layers.PatchEmbed:
        raise UserError(
            f"patch embedding {type(model.patch_embed).__name__} is not supported: only timm's PatchEmbed is"
        )
    if not model.blocks:
        raise UserError("the model has no blocks")
    for i, block in enumerate(model.blocks):
        if type(block) not in (TimmBlock, Block):
            raise UserError(f"blocks.{i} is a {type(block).__name__}: only timm's pre-norm Block is supported")
        if type(block.attn) is not TimmAttention and not isinstance(block.attn, Attention):
            raise UserError(f"blocks.{i}.attn is a {type(block.attn).__name__}: only timm's Attention is supported")


def _arguments(model: Any) -> dict[str, Any]:
    """`VisionTransformer`'s constructor arguments, read off a model."""
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
        "proj_bias": attn.proj.bias is not None,
        # What matters is whether there is a LayerScale: its values are weights.
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
        "norm_layer": _layer_text(block.norm1),
        "embed_norm_layer": _layer_text(patch.norm) if _present(patch.norm) else None,
        "act_layer": _layer_text(mlp.act),
        "mlp_layer": _layer_text(mlp),
    }


def _present(module: nn.Module) -> bool:
    return not isinstance(module, nn.Identity)


def ratio(hidden: int, dim: int) -> float:
    """A ratio from which timm's `int(dim * ratio)` gives `hidden` back."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim


def _layer_text(module: Any) -> str:
    """A layer's class, with its eps if it is a norm: `nn.GELU`, `timm.LayerNorm:eps=1e-06`."""
    cls = type(module)
    if cls is timm.layers.GluMlp and not module.gate_last:
        return "timm.SwiGLUPacked"
    home = next((h for h, place in _HOMES.items() if getattr(place, cls.__name__, None) is cls), None)
    if home is None:
        raise UserError(
            f"layer type {cls.__module__}.{cls.__name__} is not supported: expected one of torch's or timm's"
        )
    return f"{home}.{cls.__name__}" + (f":eps={module.eps!r}" if hasattr(module, "eps") else "")


def _layer(text: str | None) -> Any:
    """The inverse of `_layer_text`: a constructor."""
    if text is None:
        return None
    path, _, eps = text.partition(":eps=")
    home, _, name = path.partition(".")
    cls: Any = getattr(_HOMES.get(home), name, None)
    made = cls.func if isinstance(cls, partial) else cls
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise UserError(f"layer {text!r} does not exist in this version of torch or timm {timm.__version__}")
    return partial(cls, eps=float(eps)) if eps else cls


_HOMES: dict[str, Any] = {"nn": nn, "timm": timm.layers}
_ABSENT_IN_EVAL = (nn.Identity, nn.Dropout, timm.layers.DropPath)
