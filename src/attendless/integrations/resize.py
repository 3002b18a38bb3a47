"""Move a model to another input size of any aspect ratio; position embeddings are resampled as timm does."""

from __future__ import annotations

from typing import Any

from timm.layers import resample_abs_pos_embed
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..attention import Attention
from ..errors import UserError
from ..sizes import channels, image_config, size_text
from .timm_inplace import slots as timm_inplace


def resize(model: Any, size: tuple[int, int]) -> None:
    """Make `model` expect images of `size` (height, width), in place."""
    if hasattr(model, "set_input_size"):
        check_patches(model.patch_embed, size)
        before, positions = getattr(model.patch_embed, "grid_size", None), getattr(model, "pos_embed", None)
        model.set_input_size(img_size=size, **_windows(model))
        if isinstance(model, VisionTransformer) and before is not None and model.pos_embed is positions:
            _resample_same_count(model, before)
    # Also for models that accept any size: evaluation reads the size from the configuration.
    model.pretrained_cfg = {**image_config(model), "input_size": (channels(model), *size)}
    for slot in timm_inplace.find(model) if timm_inplace.supports(model) else ():
        if isinstance(slot.attn, Attention):
            slot.attn.resize(slot.grid)


def _windows(model: nn.Module) -> dict[str, Any]:
    """Keep the windows that a Swin was trained with; timm would scale them with the image."""
    if not isinstance(model, SwinTransformer):
        return {}
    stages: Any = model.layers
    found = [block.window_size for stage in stages for block in stage.blocks if hasattr(block, "window_size")]
    return {"window_size": max(found, default=(7, 7))}


def check_patches(embed: Any, size: tuple[int, int]) -> None:
    """Raise unless images of `size` have a whole number of patches."""
    patch, pads = getattr(embed, "patch_size", None), getattr(embed, "dynamic_img_pad", False)
    # Hierarchical attendless models pad, and have no `patch_size`.
    if patch and any(s < p or (s % p and not pads) for s, p in zip(size, patch, strict=True)):
        near = dict.fromkeys(size_text(found) for found in zip(*map(_nearest, size, patch), strict=True))
        raise UserError(
            f"size {size[0]}x{size[1]} is not a whole number of {patch[0]}x{patch[1]} patches: nearest "
            f"{'is' if len(near) == 1 else 'are'} {' and '.join(near)}"
        )


def _nearest(side: int, patch: int) -> tuple[int, int]:
    """The nearest sides of whole patches, below and above."""
    return max(side // patch, 1) * patch, max(-(-side // patch), 1) * patch


def _resample_same_count(model: Any, before: tuple[int, int]) -> None:
    """Resample positions whose number stays, such as from 14x14 to 7x28; timm before 1.0.31 does not."""
    after = model.patch_embed.grid_size
    if model.pos_embed is None or before == after:
        return
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    moved = resample_abs_pos_embed(model.pos_embed, new_size=after, old_size=before, num_prefix_tokens=prefix)
    model.pos_embed = nn.Parameter(moved.detach().contiguous(), requires_grad=model.pos_embed.requires_grad)
