"""Rebuild Hugging Face's ViT, DINOv2 (with and without registers) and CLIP vision towers as an attendless backbone.

The weights are renamed; both the older and the newer key names of transformers are known. `transformers` is imported
only to open a folder. The rebuilt model returns the logits of a classifier, the image embedding of CLIP with
projection, or the normalised class token (`pooler_output`; `last_hidden_state[:, 0]` of `ViTModel`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm.data
import torch
from torch import Tensor, nn

from ...errors import UserError
from ..support import hf_rebuilt, is_transformers
from .architecture import Description
from .arguments import ratio

_ACTIVATIONS = {
    "gelu": "nn.GELU",
    "quick_gelu": "timm.QuickGELU",
    "gelu_new": "timm.GELUTanh",
    "gelu_pytorch_tanh": "timm.GELUTanh",
    "relu": "nn.ReLU",
    "silu": "nn.SiLU",
    "swish": "nn.SiLU",
}

_PREPARATION: dict[str, dict[str, Any]] = {
    "vit": {
        "mean": timm.data.IMAGENET_INCEPTION_MEAN,
        "std": timm.data.IMAGENET_INCEPTION_STD,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    },
    "dino": {
        "mean": timm.data.IMAGENET_DEFAULT_MEAN,
        "std": timm.data.IMAGENET_DEFAULT_STD,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
    },
    "clip": {
        "mean": timm.data.OPENAI_CLIP_MEAN,
        "std": timm.data.OPENAI_CLIP_STD,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
    },
}

#: Pattern → name in the backbone, tried in order on a key without its model's prefix. None: the weight is not used.
_RENAMES: tuple[tuple[str, str | None], ...] = (
    (r"embeddings\.(cls_token|class_embedding)", "cls_token"),
    (r"embeddings\.register_tokens", "reg_token"),
    (r"embeddings\.(position_embeddings|position_embedding\.weight)", "pos_embed"),
    (r"embeddings\.(patch_embeddings\.projection|patch_embedding)\.(weight|bias)", r"patch_embed.proj.\2"),
    (r"embeddings\.(mask_token|position_ids)|pooler\..*", None),
    (r"pre_layrnorm\.(.*)", r"norm_pre.\1"),
    (r"(layernorm|post_layernorm)\.(.*)", r"norm.\2"),
    (r"(classifier|visual_projection)\.(.*)", r"head.\2"),
    (r"(?:encoder\.)?layers?\.(\d+)\.(.*)", r"blocks.\1.\2"),
)
_BLOCK_RENAMES: tuple[tuple[str, str], ...] = (
    (r"(layernorm_before|layer_norm1|norm1)\.(.*)", r"norm1.\2"),
    (r"(layernorm_after|layer_norm2|norm2)\.(.*)", r"norm2.\2"),
    (r"(attention\.attention|attention|self_attn)\.(q|k|v)(uery|ey|alue|_proj)\.(.*)", r"attn.\2.\4"),
    (r"(attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.(.*)", r"attn.proj.\2"),
    (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
    (r"mlp\.(gate|up)_proj\.(.*)", r"mlp.\1.\2"),
    (r"(intermediate\.dense|mlp\.fc1|mlp\.weights_in)\.(.*)", r"mlp.fc1.\2"),
    (r"(output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)\.(.*)", r"mlp.fc2.\2"),
)
#: Weights that the backbone concatenates into one.
_FUSED = (("attn", ("q", "k", "v"), "attn.qkv"), ("mlp", ("gate", "up"), "mlp.fc1"))


def supports(model: nn.Module) -> bool:
    return is_transformers(model) and type(model).__name__ in hf_rebuilt()


def columnar(model: Any) -> nn.Module:
    """Build the attendless backbone of a model, with full attention and copies of its weights."""
    weights = rename(model.state_dict())
    config = getattr(model.config, "vision_config", model.config)
    first = next(model.parameters())
    ours: Any = _describe(weights, config).build().to(device=first.device, dtype=first.dtype)
    ours.load_state_dict(weights, assign=True)
    for value in ours.parameters():
        value.requires_grad_(first.requires_grad)
    labels = len(weights.get("head.bias", ()))
    ours.pretrained_cfg = ours.default_cfg = {
        "architecture": type(model).__name__,
        "input_size": (config.num_channels, *_pair(config.image_size)),
        "num_classes": labels,
        # The usual preprocessing of these models; `open_folder` reads that of a checkpoint.
        **_PREPARATION[_kind(weights)],
    }
    return ours.train(model.training)


def _kind(weights: dict[str, Tensor]) -> str:
    if "norm_pre.weight" in weights:
        return "clip"
    return "dino" if "blocks.0.ls1.gamma" in weights else "vit"


def open_folder(folder: Path) -> nn.Module:
    """Open a folder that `save_pretrained` wrote (config.json and safetensors) as an attendless backbone."""
    try:
        import transformers
    except ImportError:
        raise UserError("opening a Hugging Face folder needs transformers: pip install 'attendless[hf]'") from None
    try:
        names = json.loads((folder / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError):
        raise UserError(
            f"{str(folder)!r} is not a model's folder: expected config.json with its architecture"
        ) from None
    # A CLIP model contains its vision tower.
    name = "CLIPVisionModelWithProjection" if names == ["CLIPModel"] else names[0]
    if name not in hf_rebuilt():
        raise UserError(
            f"{str(folder)!r} holds a {name}, which cannot be rebuilt: open it with transformers and give the model to "
            "attendless.convert or attendless.patch"
        )
    try:
        model = getattr(transformers, name).from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except Exception as error:  # transformers raises many types for a damaged folder
        raise UserError(f"{str(folder)!r} cannot be opened: {str(error).partition(chr(10))[0]}") from None
    ours: Any = columnar(model)
    processor = folder / "preprocessor_config.json"
    if processor.is_file():
        found = json.loads(processor.read_text())
        given = {"mean": found.get("image_mean"), "std": found.get("image_std")}
        ours.pretrained_cfg |= {key: tuple(value) for key, value in given.items() if value}
    return ours.eval()


def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy weights from Hugging Face's names to those of the backbone."""
    named: dict[str, Tensor] = {}
    for key, value in weights.items():
        name = _rename(key)
        if name is not None:
            named[name] = value.detach().clone()
    for part, pieces, whole in _FUSED:
        _fuse(named, part, pieces, whole)
    width = named["patch_embed.proj.weight"].shape[0]
    named["cls_token"] = named["cls_token"].reshape(1, 1, width)
    named["pos_embed"] = named["pos_embed"].reshape(1, -1, width)
    if "reg_token" in named:
        # Registers have no positions; add the class token's to the class token itself.
        named["cls_token"] = named["cls_token"] + named["pos_embed"][:, :1]
        named["pos_embed"] = named["pos_embed"][:, 1:].clone()
    if "head.weight" in named and "head.bias" not in named:
        named["head.bias"] = torch.zeros_like(named["head.weight"][:, 0])
    return named


def _rename(key: str) -> str | None:
    bare = re.sub(r"^(vit|dinov2|dinov2_with_registers|vision_model)\.", "", key)
    name = _first(bare, _RENAMES, key)
    if name is None or not name.startswith("blocks."):
        return name
    index, rest = name.removeprefix("blocks.").split(".", 1)
    return f"blocks.{index}.{_first(rest, _BLOCK_RENAMES, key)}"


def _first(text: str, renames: Iterable[tuple[str, str | None]], key: str) -> str | None:
    for pattern, name in renames:
        if found := re.fullmatch(pattern, text):
            return None if name is None else found.expand(name)
    raise UserError(f"weight {key!r} is not one this version knows of Hugging Face's ViT, DINOv2 or CLIP")


def _fuse(named: dict[str, Tensor], part: str, pieces: tuple[str, ...], whole: str) -> None:
    for key in [k for k in named if f".{part}.{pieces[0]}." in k]:
        block, end = key.split(f".{part}.{pieces[0]}.")
        named[f"{block}.{whole}.{end}"] = torch.cat([named.pop(f"{block}.{part}.{p}.{end}") for p in pieces])


def _describe(weights: dict[str, Tensor], config: Any) -> Description:
    """Read the arguments of the backbone from the shapes of the weights and from the configuration."""
    width, channels, *patch = weights["patch_embed.proj.weight"].shape
    fc1, fc2 = weights["blocks.0.mlp.fc1.weight"], weights["blocks.0.mlp.fc2.weight"]
    gated = fc1.shape[0] != fc2.shape[1]
    act = "silu" if gated else config.hidden_act
    if act not in _ACTIVATIONS:
        raise UserError(f"activation {act!r} is not supported. There are: {', '.join(sorted(_ACTIVATIONS))}")
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    arguments = {
        "img_size": list(_pair(config.image_size)),
        "patch_size": patch,
        "in_chans": channels,
        "num_classes": weights["head.weight"].shape[0] if "head.weight" in weights else 0,
        "global_pool": "token",
        "embed_dim": width,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio(fc1.shape[0], width),
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in weights else None,
        "no_embed_class": registers > 0,
        "reg_tokens": registers,
        "pre_norm": "norm_pre.weight" in weights,
        "fc_norm": False,
        "pos_drop_rate": getattr(config, "hidden_dropout_prob", 0.0),
        "proj_drop_rate": getattr(config, "hidden_dropout_prob", 0.0),
        "attn_drop_rate": getattr(config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0.0)),
        "drop_path_rate": getattr(config, "drop_path_rate", 0.0),
        "norm_layer": f"nn.LayerNorm:eps={config.layer_norm_eps!r}",
        "act_layer": _ACTIVATIONS[act],
        "mlp_layer": "timm.SwiGLUPacked" if gated else "timm.Mlp",
    }
    return Description("columnar", arguments)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
