"""Where in a model attentions stand that can be adapted, and on which grid each one's tokens stand.

An attention in itself does not know: the model around it does, its *owner*. Owners that hand on rows of tokens are
known by how they lay them out (their `_pos_embed`: prefix first, then the patches row by row), so that a subclass
counts as long as it keeps to that.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.hieradet_sam2 import HieraDet
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from ...attention import Grid
from ...errors import UserError
from ...sizes import Size, input_size
from . import hf_sam as huggingface
from .adapted import Adapted
from .attentions import ADAPTED, REFUSED


@dataclasses.dataclass(frozen=True)
class Place:
    """An attention of a model by its path, the grid it attends on, and how many such grids an image has (windows).

    `stays` says why nothing but full attention can stand there, if that is so. `entering` and `leaving` count the
    tokens before and after it, where windows are padded or queries pooled; 0: those of the grid.
    """

    path: str
    grid: Grid
    windows: int = 1
    stays: str = ""
    entering: int = 0
    leaving: int = 0


@dataclasses.dataclass(frozen=True)
class Owner:
    """A model (or part of one) that says where its tokens stand, at `path`."""

    path: str
    model: Any
    places: tuple[Place, ...]


def _rows(owner: Any, size: Size) -> Iterator[Place]:
    """Tokens in a row, all layers on one grid."""
    height, width = owner.patch_embed.dynamic_feat_size(size)
    grid = Grid(height, width, owner.num_prefix_tokens)
    for path, module in owner.named_modules():
        if _original(module) in ADAPTED:
            yield Place(path, grid)


def _sam(owner: Any, size: Size) -> Iterator[Place]:
    height, width = owner.patch_embed.dynamic_feat_size(size)
    for i, block in enumerate(owner.blocks):
        yield _windowed(f"blocks.{i}.attn", height, width, block.window_size)


def _hf_sam(owner: Any, size: Size) -> Iterator[Place]:
    height, width = (side // owner.config.patch_size for side in size)
    for i, layer in enumerate(owner.layers):
        if _original(layer.attn) in ADAPTED:
            yield _windowed(f"layers.{i}.attn", height, width, layer.window_size)


def _windowed(path: str, height: int, width: int, side: int) -> Place:
    if not side:
        return Place(path, Grid(height, width))
    windows, why = ceil(height / side) * ceil(width / side), f"it attends in windows of {side}x{side} already"
    return Place(path, Grid(side, side), windows, why, height * width, height * width)


def _hiera(owner: Any, size: Size) -> Iterator[Place]:
    embed = owner.patch_embed
    stride = getattr(embed, "patch_size", None) or embed.proj.stride
    height, width = ceil(size[0] / stride[0]), ceil(size[1] / stride[1])
    for i, block in enumerate(owner.blocks):
        rows, columns = block.window_size if block.is_windowed else (height, width)
        windows = ceil(height / rows) * ceil(width / columns)
        why = f"it attends in windows of {rows}x{columns} already" if block.is_windowed else ""
        entering = height * width
        if block.q_stride is not None:
            why = why or "it pools its queries"
            height, width = height // block.q_stride[0], width // block.q_stride[1]
        yield Place(f"blocks.{i}.attn", Grid(rows, columns), windows, why, entering, height * width)


def _newer(module: str, *names: str) -> tuple[type, ...]:
    """Classes that only newer versions of timm have."""
    try:
        found = importlib.import_module(f"timm.models.{module}")
    except ImportError:
        return ()
    return tuple(getattr(found, name) for name in names)


_IN_ROWS: tuple[Any, ...] = (
    Eva,
    *_newer("deepseek_vit", "DeepseekVitEncoder"),
    *_newer("qwen3_vit", "Qwen3VitEncoder"),
)
_CLASSIFIERS = (*_newer("deepseek_vit", "DeepseekVitClassifier"), *_newer("qwen3_vit", "Qwen3VitClassifier"))
#: Models that can be adapted as a whole, and by which names people know them.
WHOLE = (*_IN_ROWS, *_CLASSIFIERS, VisionTransformerSAM, HieraDet)
NAMES = ("timm's Eva (DINOv3, EVA-02, PE)", "SAM", "SAM 2's Hiera", "the ViTs of DeepSeek and Qwen3")
_LAID_OUT = {cls._pos_embed for cls in (VisionTransformer, VisionTransformerDistilled, *_IN_ROWS)}
_BY_CLASS: dict[type, Callable[[Any, Size], Iterator[Place]]] = {VisionTransformerSAM: _sam, HieraDet: _hiera}
#: Owners that are known, and why their attentions cannot be adapted.
_REFUSED_OWNERS: dict[type, str] = {NaFlexVit: "the images of a batch have a grid each"}


def owners(model: nn.Module, size: Size | None = None) -> list[Owner]:
    """Every owner in `model`, with its places for images of `size` (default: what each was made for)."""
    for attention, encoder in huggingface.imported():
        ADAPTED.setdefault(attention, huggingface.adapted(attention))
        _BY_CLASS.setdefault(encoder, _hf_sam)
    found = []
    for path, module in model.named_modules():
        find = _finder(module)
        if find is not None:
            found.append(Owner(path, module, tuple(find(module, size or input_size(module)))))
    return found


def turn(owner: Any) -> float:
    """How far an owner's rotary positions turn keys from one patch to the next, at most, in radians: on the grid of its
    images, or, if it takes any, on one of 64 × 64."""
    rope = getattr(owner, "rope", None)
    if rope is None:
        return 0.0
    if any(value.is_meta for value in (*rope.parameters(), *rope.buffers())):
        raise UserError(f"how far {type(owner).__name__} turns its keys is not known on the device meta: load it first")
    height, width = (64, 64) if getattr(rope, "feat_shape", None) is None else owner.patch_embed.grid_size
    training = rope.training
    table = rope.eval().get_embed(shape=(height, width)).detach().float()  # in training some move at random
    rope.train(training)
    sin, cos = table.unflatten(-2, (height, width)).chunk(2, dim=-1)
    angle = torch.atan2(sin, cos)
    steps = [angle.diff(dim=-3), angle.diff(dim=-2)]
    # Angles are known up to whole turns; the shorter way round is meant.
    return max(float(torch.atan2(s.sin(), s.cos()).abs().max()) for s in steps if s.numel())


def unserved(model: nn.Module, known: list[Owner]) -> list[tuple[str, str]]:
    """Attentions that cannot be adapted: their paths, and why."""
    served = {joined(owner.path, place.path) for owner in known for place in owner.places}
    refused = {path: _REFUSED_OWNERS[type(m)] for path, m in model.named_modules() if type(m) in _REFUSED_OWNERS}
    found = []
    for path, module in model.named_modules():
        if path not in served and (why := _why(module)):
            around = [reason for owner, reason in refused.items() if not owner or path.startswith(f"{owner}.")]
            found.append((path, around[0] if around else why))
    return found


def _why(module: nn.Module) -> str:
    name = type(module).__name__
    if type(module) in REFUSED:
        return REFUSED[type(module)]
    if _original(module) in ADAPTED:
        return "nothing around it says where its tokens stand"
    elsewhere = type(module).__module__.startswith("transformers.")  # whose attentions stand behind a door of their own
    return f"{name} is not a class that is known here" if name.endswith("Attention") and not elsewhere else ""


def joined(*paths: str) -> str:
    return ".".join(filter(None, paths))


def _finder(module: Any) -> Callable[[Any, Size], Iterator[Place]] | None:
    if type(module) in _BY_CLASS:
        return _BY_CLASS[type(module)]
    laid_out = getattr(type(module), "_pos_embed", None) in _LAID_OUT
    return _rows if laid_out and hasattr(module.patch_embed, "dynamic_feat_size") else None


def _original(module: nn.Module) -> type:
    return module.original if isinstance(module, Adapted) else type(module)
