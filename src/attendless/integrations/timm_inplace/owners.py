"""Find the attentions of a model that can be exchanged in place, and the grid of each one's tokens.

An attention module does not know its grid. The model around it, its *owner*, does. Owners of token rows are recognised
by their `_pos_embed` (prefix tokens first, then the patches in row-major order), so a subclass that keeps it is served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import torch
from timm.models.hieradet_sam2 import HieraDet
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from ...attention import Grid
from ...errors import UserError
from ...sizes import Size, input_size
from ..reducing import grids
from ..support import families, is_published_sam, is_transformers, timm_models, timm_refusals
from .attentions import adapted_class


@dataclasses.dataclass(frozen=True)
class Site:
    """An attention of an owner.

    path: of the attention in the owner
    grid: its tokens; an image has `windows` such grids
    fixed: why only full attention can be put there; empty if others can
    folds: whether full attention of attendless can be put there
    entering, leaving: tokens of the block before and after the attention, where windows are padded or queries pooled;
        0: those of the grid
    size: of the images that the owner takes; None: as `input_size` says
    """

    owner: Any
    path: str
    grid: Grid
    windows: int = 1
    fixed: str = ""
    entering: int = 0
    leaving: int = 0
    folds: bool = True
    size: Size | None = None


def sites(model: nn.Module, size: Size | None = None) -> Iterator[tuple[str, Site]]:
    """Every attention with an owner, and its path in `model`, for images of `size` (default: the owner's own)."""
    for path, module in model.named_modules():
        find = _finder(module)
        for site in find(module, size or input_size(module)) if find is not None else ():
            yield joined(path, site.path), site


def _rows(owner: Any, size: Size) -> Iterator[Site]:
    """Rows of tokens; all layers have one grid, except where tokens are reduced."""
    height, width = owner.patch_embed.dynamic_feat_size(size)
    grid = Grid(height, width, owner.num_prefix_tokens)
    for path, module in owner.named_modules():
        if adapted_class(module) is not None:
            entering, grid = grids(owner.get_submodule(path.rpartition(".")[0]), grid)
            yield Site(owner, path, entering)


def _sam(owner: Any, size: Size) -> Iterator[Site]:
    height, width = owner.patch_embed.dynamic_feat_size(size)
    for i, block in enumerate(owner.blocks):
        yield _windowed(owner, f"blocks.{i}.attn", height, width, block.window_size)


def _hf_sam(owner: Any, size: Size) -> Iterator[Site]:
    height, width = (side // owner.config.patch_size for side in size)
    for i, layer in enumerate(owner.layers):
        if adapted_class(layer.attn) is not None:
            yield _windowed(owner, f"layers.{i}.attn", height, width, layer.window_size)


def _published_sam(owner: Any, size: Size) -> Iterator[Site]:
    """Its absolute positions, which are not resampled, fix the size of its images."""
    steps = owner.patch_embed.proj.stride
    if owner.pos_embed is not None:
        size = (owner.pos_embed.shape[1] * steps[0], owner.pos_embed.shape[2] * steps[1])
    height, width = (side // step for side, step in zip(size, steps, strict=True))
    for i, block in enumerate(owner.blocks):
        site = _windowed(owner, f"blocks.{i}.attn", height, width, block.window_size)
        yield dataclasses.replace(site, size=size)


def _windowed(owner: Any, path: str, height: int, width: int, side: int) -> Site:
    if not side:
        return Site(owner, path, Grid(height, width))
    windows, why = ceil(height / side) * ceil(width / side), f"it attends in windows of {side}x{side} already"
    return Site(owner, path, Grid(side, side), windows, why, height * width, height * width)


def _hiera(owner: Any, size: Size) -> Iterator[Site]:
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
        path, grid = f"blocks.{i}.attn", Grid(rows, columns)
        yield Site(owner, path, grid, windows, why, entering, height * width, folds=not why)


_BY_CLASS: dict[type, Callable[[Any, Size], Iterator[Site]]] = {VisionTransformerSAM: _sam, HieraDet: _hiera}
_HF_ENCODERS = {
    name for row in families() if row.library == "transformers" and row.patch == "timm_inplace" for name in row.models
}
_LAID_OUT = {
    cls._pos_embed
    for cls in (*timm_models("rebuild"), *timm_models("timm_inplace"))
    if cls not in _BY_CLASS and hasattr(cls, "_pos_embed")
}


def _finder(module: nn.Module) -> Callable[[Any, Size], Iterator[Site]] | None:
    if type(module) in _BY_CLASS:
        return _BY_CLASS[type(module)]
    if is_published_sam(type(module), "ImageEncoderViT"):
        return _published_sam
    if type(module).__name__ in _HF_ENCODERS and is_transformers(module):
        return _hf_sam
    laid_out = getattr(type(module), "_pos_embed", None) in _LAID_OUT
    return _rows if laid_out and hasattr(module.patch_embed, "dynamic_feat_size") else None


def turn(owner: Any) -> float:
    """The largest angle in radians by which an owner's rotary positions turn a key from one patch to the next: on the
    grid of its images or, if it takes any size, on 64 × 64."""
    rope = getattr(owner, "rope", None)
    if rope is None:
        return 0.0
    if any(value.is_meta for value in (*rope.parameters(), *rope.buffers())):
        raise UserError(f"the rotary positions of {type(owner).__name__} are on the device meta: load it first")
    height, width = (64, 64) if getattr(rope, "feat_shape", None) is None else owner.patch_embed.grid_size
    training = rope.training
    table = rope.eval().get_embed(shape=(height, width)).detach().float()  # some embeddings are random in training mode
    rope.train(training)
    sin, cos = table.unflatten(-2, (height, width)).chunk(2, dim=-1)
    angle = torch.atan2(sin, cos)
    steps = [angle.diff(dim=-3), angle.diff(dim=-2)]
    # Angles are known up to whole turns; take the shorter way round.
    return max(float(torch.atan2(s.sin(), s.cos()).abs().max()) for s in steps if s.numel())


def refused(model: nn.Module, served: set[str]) -> list[tuple[str, str]]:
    """The attentions that are not among the paths `served`, each with the reason."""
    refusals = timm_refusals()
    owners = {path: refusals[type(m)] for path, m in model.named_modules() if type(m) in refusals}
    found = []
    for path, module in model.named_modules():
        if path not in served and (why := _why(module)):
            around = [reason for owner, reason in owners.items() if path.startswith(f"{owner}." if owner else "")]
            found.append((path, around[0] if around else why))
    return found


def _why(module: nn.Module) -> str:
    name, refusals = type(module).__name__, timm_refusals()
    if type(module) in refusals and "Attention" in name:
        return refusals[type(module)]
    if adapted_class(module) is not None:
        return "no module around it tells the grid of its tokens"
    elsewhere = is_transformers(module)  # `hf_interface` reports these
    return f"{name} is not a supported attention class" if name.endswith("Attention") and not elsewhere else ""


def joined(*paths: str) -> str:
    return ".".join(filter(None, paths))
