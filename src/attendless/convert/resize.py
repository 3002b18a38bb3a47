"""Another input size, of any aspect: position embeddings are resampled as timm does, attentions resize themselves."""

from __future__ import annotations

from typing import Any

from timm.layers import resample_abs_pos_embed
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..errors import UserError


def parse_size(size: int | tuple[int, int] | str) -> tuple[int, int]:
    """`384`, `"384"`, `"240x320"` or `(240, 320)` → (height, width)."""
    if isinstance(size, str):
        parts = size.lower().split("x")
        if len(parts) > 2 or not all(part.isdecimal() for part in parts):
            raise UserError(f"size {size!r} cannot be read: expected S or HxW in pixels, such as 384 or 240x320")
        return int(parts[0]), int(parts[-1])
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def resize(model: Any, size: tuple[int, int]) -> None:
    """Make `model` expect images of `size` (height, width), in place."""
    if hasattr(model, "set_input_size"):
        _check_patches(model.patch_embed, size)
        before = getattr(model.patch_embed, "grid_size", None)
        model.set_input_size(img_size=size, **_windows(model))
        if isinstance(model, VisionTransformer) and before is not None:
            _resample_same_count(model, before)
    # A model without a size of its own takes any; what evaluates it learns the size here.
    channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
    model.pretrained_cfg = {**as_dict(getattr(model, "pretrained_cfg", None)), "input_size": (channels, *size)}


def input_size(model: Any) -> tuple[int, int]:
    """The height and width `model` expects."""
    found = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if found is None or not hasattr(model, "set_input_size"):
        found = as_dict(getattr(model, "pretrained_cfg", None)).get("input_size", (3, 224, 224))[-2:]
    height, width = found
    return int(height), int(width)


def as_dict(cfg: Any) -> dict[str, Any]:
    """timm's `pretrained_cfg`, which is a dict, a dataclass or missing, as a dict of what it says."""
    found = dict(cfg) if isinstance(cfg, dict) else vars(cfg) if cfg is not None else {}
    return {key: value for key, value in found.items() if value is not None}


def _windows(model: Any) -> dict[str, Any]:
    """Swin keeps the windows it was trained with; timm would scale them with the image."""
    if not isinstance(model, SwinTransformer):
        return {}
    stages: Any = model.layers
    found = [block.window_size for stage in stages for block in stage.blocks if hasattr(block, "window_size")]
    return {"window_size": max(found, default=(7, 7))}


def _check_patches(embed: Any, size: tuple[int, int]) -> None:
    patch, pads = getattr(embed, "patch_size", None), getattr(embed, "dynamic_img_pad", False)
    # Our pyramids pad, so they have no patch size to insist on.
    if patch and any(s < p or (s % p and not pads) for s, p in zip(size, patch, strict=True)):
        raise UserError(f"size {size[0]}x{size[1]} is not a whole number of {patch[0]}x{patch[1]} patches")


def _resample_same_count(model: Any, before: tuple[int, int]) -> None:
    """timm resamples when the number of positions changes; from 14x14 to 7x28 they must be resampled all the same."""
    after = model.patch_embed.grid_size
    if model.pos_embed is None or before == after or before[0] * before[1] != after[0] * after[1]:
        return
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    moved = resample_abs_pos_embed(model.pos_embed, new_size=after, old_size=before, num_prefix_tokens=prefix)
    model.pos_embed = nn.Parameter(moved.detach().contiguous(), requires_grad=model.pos_embed.requires_grad)
