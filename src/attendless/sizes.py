"""Image sizes: as text, and as models state them, with the rest of a timm model's image configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import UserError

Size = tuple[int, int]
#: The longest side accepted: a larger number is a typing error.
_LONGEST = 2**16


def parse_size(size: int | tuple[int, int] | str) -> Size:
    """`384`, `"384"`, `"240x320"` or `(240, 320)` → (height, width)."""
    sides: Any = (size, size) if isinstance(size, int) else size
    if isinstance(size, str):
        parts = size.lower().split("x")
        good = len(parts) <= 2 and all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts)
        sides = (int(parts[0]), int(parts[-1])) if good else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UserError(f"size {size!r} cannot be read: expected S or HxW in pixels, such as 384 or 240x320")
    if max(sides) > _LONGEST:
        raise UserError(f"size {size!r} is too large: expected at most {_LONGEST:,} px on each side, such as 384")
    return sides[0], sides[1]


def size_text(size: Size) -> str:
    """The inverse of `parse_size`: `S` for squares, otherwise `HxW`."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def input_size(model: Any) -> Size:
    """The height and width of the images that `model` expects.

    A timm model with `set_input_size` stores its size in the patch embedding. A model that accepts any size stores its
    default there; for it, the configuration counts.
    """
    found = getattr(getattr(model, "patch_embed", None), "img_size", None)
    theirs = getattr(getattr(model, "config", None), "image_size", None)  # Hugging Face's models
    if theirs is not None:
        found = theirs
    elif found is None or not hasattr(model, "set_input_size"):
        found = image_config(model).get("input_size", found or (224, 224))[-2:]
    return parse_size(found if isinstance(found, int) else tuple(found))


def channels(model: nn.Module) -> int:
    """The number of channels of the images that `model` expects."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    return first.in_channels if first is not None else 3


def model_name(model: Any) -> str:
    """The timm name of the model, or its class name."""
    return str(image_config(model).get("architecture") or type(model).__name__)


def set_image_config(model: nn.Module, config: dict[str, Any]) -> None:
    """Replace timm's configuration of a model's images and classifier."""
    configured: Any = model
    configured.pretrained_cfg = configured.default_cfg = config


def image_config(model: Any) -> dict[str, Any]:
    """timm's configuration of a model's images and classifier (`pretrained_cfg`), without empty entries."""
    cfg = getattr(model, "pretrained_cfg", None)
    found = cfg if isinstance(cfg, dict) else vars(cfg) if cfg is not None else {}
    return {key: value for key, value in found.items() if value is not None}
