"""MODEL as the command line and Python take it: a name timm knows, or the path of a file `save` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..errors import UserError, unknown
from .rebuild import convert

Size = int | tuple[int, int]


def open_model(
    model: str | Path,
    *,
    attention: str | None = None,
    weights: str | Path | None = None,
    size: Size | str | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
) -> nn.Module:
    """Build `model` by its name, load `weights` from a file, set its input size and convert it to `attention`.

    Without `attention` the model stays what it is. Without `num_classes` the weights decide how many there are; if it
    differs from theirs, the classifier starts anew, ready to be trained.
    """
    built = _create(str(model), read_weights(weights) if weights is not None else None, num_classes, pretrained)
    if size is not None:
        resize(built, parse_size(size))
    return built if attention is None else convert(built, attention)


def parse_size(size: Size | str) -> tuple[int, int]:
    """`384`, `"384"`, `"240x320"` or `(240, 320)` → (height, width)."""
    if isinstance(size, str):
        parts = size.lower().split("x")
        if len(parts) > 2 or not all(part.isdecimal() for part in parts):
            raise UserError(f"size {size!r} cannot be read: expected S or HxW in pixels, such as 384 or 240x320")
        return int(parts[0]), int(parts[-1])
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def resize(model: Any, size: tuple[int, int]) -> None:
    """Set the input size in place; position embeddings are resampled as timm does, prefix tokens kept apart."""
    if not hasattr(model, "set_input_size"):
        return  # fully convolutional at its borders: it takes any size as it is
    patch = model.patch_embed.patch_size
    if any(
        s < p or (s % p and not getattr(model.patch_embed, "dynamic_img_pad", False))
        for s, p in zip(size, patch, strict=True)
    ):
        raise UserError(f"size {size[0]}x{size[1]} is not a whole number of {patch[0]}x{patch[1]} patches")
    before = model.patch_embed.grid_size
    model.set_input_size(img_size=size)
    after = model.patch_embed.grid_size
    # timm resamples when the number of tokens changes; 14x14 to 7x28 must be resampled all the same.
    if (
        isinstance(model, VisionTransformer)
        and model.pos_embed is not None
        and before != after
        and before[0] * before[1] == after[0] * after[1]
    ):
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        moved = resample_abs_pos_embed(model.pos_embed, new_size=after, old_size=before, num_prefix_tokens=prefix)
        model.pos_embed = nn.Parameter(moved.detach(), requires_grad=model.pos_embed.requires_grad)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a PyTorch checkpoint read without unpickling code."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"weights {str(path)!r}: no such file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise UserError(f"weights {str(path)!r} cannot be read: {error}") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"weights {str(path)!r} cannot be read as safetensors or as plain tensors: {error}") from None
    for wrapper in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"weights {str(path)!r} do not hold a state dict: names with their tensors")
    return {name.removeprefix("module."): value for name, value in found.items()}


def _create(name: str, weights: dict[str, Tensor] | None, num_classes: int | None, pretrained: bool) -> nn.Module:
    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models())
    if num_classes is None and weights is not None and "head.weight" in weights:
        num_classes = weights["head.weight"].shape[0]
    model = timm.create_model(name, pretrained=pretrained, **({} if num_classes is None else {"num_classes": num_classes}))
    if weights is not None:
        _load(model, weights, name)
    return model.eval()


def _load(model: Any, weights: dict[str, Tensor], name: str) -> None:
    own = model.state_dict()
    fitting = {key: value for key, value in weights.items() if key in own and own[key].shape == value.shape}
    missing = [key for key in own if key not in fitting and not key.startswith("head")]
    if missing:
        raise UserError(f"these weights do not fit {name}: {len(missing)} of {len(own)} missing, such as {missing[0]}")
    model.load_state_dict(fitting, strict=False)
