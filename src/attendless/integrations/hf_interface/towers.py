"""Find the attentions of Hugging Face's vision towers and the grid of their tokens.

A model behind transformers' `AttentionInterface` passes q, k and v, and no grid. The table in `support` lists the
tokens that each family puts in front of its patches and behind them; every call checks the number of tokens against it.
This module does not import transformers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from math import ceil
from typing import Any

from torch import nn

from ...attention import Grid
from ...sizes import Size
from ..grid_tracking import GridSize, Watch, number
from ..packed_sizes import PackedSizes, takes
from ..support import Family, families, hf_family, is_transformers
from ..token_order import Segment, by_rows, segment

#: Patches along a side for the costs of towers whose configuration has no image size.
_ANY = 64


@dataclasses.dataclass
class TowerLayer:
    """An attention of a vision tower.

    name: path of the attention; `block`: path of the layer around it
    embedding: the module that makes the patches; for packed images, the tower that receives their sizes
    grid: the tokens for images of the configuration's size; an image has `windows` such grids
    pooled: keys per query
    fixed: why only full attention can be put there; empty if others can
    index, depth: position among the layers that share a configuration
    """

    name: str
    module: Any
    family: Family
    embedding: nn.Module
    block: str
    grid: Grid
    windows: int = 1
    pooled: int = 1
    fixed: str = ""
    index: int = 0
    depth: int = 1

    @property
    def size(self) -> Size:
        """The image size in the configuration."""
        return _image(self.module.config)

    @property
    def heads(self) -> tuple[int, int]:
        """The number of heads, and their width."""
        config, module = self.module.config, self.module
        owners = (module, config)
        heads = next(getattr(x, n) for n in ("num_attention_heads", "num_heads") for x in owners if hasattr(x, n))
        width = module.dim_out if hasattr(module, "dim_out") else config.hidden_size
        return heads, getattr(module, "head_dim", None) or width // heads


@dataclasses.dataclass(frozen=True)
class Found:
    """The attentions of a model that can be served and, by path, why others cannot."""

    layers: tuple[TowerLayer, ...]
    refused: dict[str, str]


def find(model: nn.Module, size: Size | None = None) -> Found:
    """Every Hugging Face attention in `model`; grids are for images of `size`, or of the configuration's size."""
    modules = dict(model.named_modules())
    attentions: dict[str, Any] = {name: module for name, module in modules.items() if _attends(module)}
    known = {name: m for name, m in attentions.items() if (row := hf_family(m)) and row.patch == "hf_interface"}
    embeddings = _embeddings(modules, known)
    for name, module in known.items():
        if (row := hf_family(module)) and row.sizes:
            embeddings[name] = _tower(modules, name, row.sizes)
    layers, refused = [], {}
    for name, module in attentions.items():
        family = hf_family(module)
        reason = _why_not(family, embeddings.get(name, []))
        if family is None or reason:
            refused[name] = f"{type(module).__name__}: {reason}"
        elif family.own_grid:
            layers.append(_own_grid_layer(name, module, family, modules[around(name)], size))
        elif family.sizes or family.order is not by_rows:
            layers.append(_ordered_layer(name, module, family, modules[embeddings[name][0]], size))
        else:
            embedding = modules[embeddings[name][0]]
            prefix = min(family.prefixes(module.config)) + family.suffixes(module.config)
            grid = _grid(_size(embedding, module.config, size), prefix)
            layers.append(TowerLayer(name, module, family, embedding, around(name), grid))
    for _, tower in itertools.groupby(layers, key=lambda layer: id(layer.module.config)):
        for index, layer in enumerate(members := list(tower)):
            layer.index, layer.depth = index, len(members)
    return Found(tuple(layers), refused)


def segments(watch: Watch | PackedSizes, family: Family, config: Any, tokens: int) -> tuple[Segment, ...]:
    """The images in the row of tokens of one call; tokens behind the patches count as prefix."""
    tokens, suffix, parts = number(tokens), family.suffixes(config), family.part_count(config)
    prefixes = [prefix * parts + suffix for prefix in family.prefixes(config)]
    if isinstance(watch, PackedSizes):
        sizes, prefix = watch.take(tokens, prefixes[0]), prefixes[0]
    else:
        size = watch.size(tuple(tokens - prefix for prefix in prefixes))
        sizes, prefix = (size,), tokens - size[0] * size[1] * size[2]
    return tuple(segment(size, prefix // parts, family.order(config, *size[1:]), parts) for size in sizes)


def _grid(size: GridSize, prefix: int) -> Grid:
    return Grid(size[1], size[2], prefix, depth=size[0])


def _attends(module: nn.Module) -> bool:
    """Whether this is the innermost attention module."""
    named = [m for m in module.modules() if _is_attention(m)]
    return len(named) == 1 and named[0] is module and not type(module).__name__.endswith("Output")


def _is_attention(module: nn.Module) -> bool:
    return hf_family(module) is not None or ("Attention" in type(module).__name__ and is_transformers(module))


def _embeddings(modules: dict[str, nn.Module], known: dict[str, Any]) -> dict[str, list[str]]:
    """For each attention in a vision tower, the modules that may make its patches.

    A tower is the smallest part of the model that holds such a module and attentions too.
    """
    shaped = _shaped()
    found: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not (_cuts(module) or type(module).__name__ in shaped):
            continue
        inside = next((here for part in _parts(name) if (here := [n for n in known if _in(n, part)])), [])
        for attention in inside:
            channels = getattr(known[attention].config, "num_channels", 3)
            if getattr(module, "in_channels", channels) == channels:
                found.setdefault(attention, []).append(name)
    return found


def _tower(modules: dict[str, nn.Module], name: str, argument: str) -> list[str]:
    """The innermost module around an attention that receives the sizes of packed images."""
    return [part for part in _parts(name) if takes(modules[part], argument)][:1]


def _shaped() -> set[str]:
    """Classes of patch embeddings that receive patches, and `spatial_shapes`."""
    return {family.embedding for family in families() if family.embedding}


def _cuts(module: nn.Module) -> bool:
    """Whether this convolution may cut images into patches."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d):
        return False
    return tuple(module.kernel_size) == tuple(module.stride) and max(module.stride) > 1


def _why_not(family: Family | None, embeddings: list[str]) -> str:
    if family is None:
        return "not a supported vision attention"
    if family.refused or family.patch != "hf_interface":
        return family.refused or "attendless.patch serves it, transformers' AttentionInterface does not"
    if family.own_grid:
        return ""
    if not embeddings:
        return "it is not in a vision tower"
    return "" if len(embeddings) == 1 else f"several modules may make its patches: {', '.join(embeddings)}"


def _parts(name: str) -> Iterator[str]:
    """The paths of the modules around a module, from the innermost to the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _in(name: str, part: str) -> bool:
    return not part or name.startswith(f"{part}.")


def around(name: str) -> str:
    """The path of the layer around an attention: the innermost one that ends in a number."""
    return next((part for part in _parts(name) if part.rpartition(".")[2].isdigit()), name.rpartition(".")[0])


def _size(embedding: Any, config: Any, size: Size | None) -> GridSize:
    """The grid of an image of `size`, or of the configuration's size."""
    if not _cuts(embedding):
        side = int(embedding.num_patches**0.5)
        return (1, side, side) if size is None else (1, size[0] // config.patch_size, size[1] // config.patch_size)
    sides = size or _image(config)
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 1)
    whole = (frames, *sides) if len(embedding.stride) == 3 else sides
    padding = (0,) * len(whole) if isinstance(embedding.padding, str) else embedding.padding
    steps = zip(whole, embedding.kernel_size, embedding.stride, padding, strict=True)
    counts = [(side + 2 * edge - kernel) // stride + 1 for side, kernel, stride, edge in steps]
    return (counts[0], counts[1], counts[2]) if len(counts) == 3 else (1, counts[0], counts[1])


def _own_grid_layer(name: str, module: Any, family: Family, block: Any, size: Size | None) -> TowerLayer:
    """An attention of the hierarchy of SAM 2 or SAM 3, in windows or on the whole grid."""
    config = module.config
    steps = _pair(getattr(config, "patch_stride", None) or config.patch_size)
    height, width = (side // step for side, step in zip(size or _image(config), steps, strict=True))
    pool = getattr(module, "query_stride", None)
    if hasattr(module, "dim_out"):
        stage = list(config.embed_dim_per_stage).index(module.dim_out)
        halvings = min(stage, config.num_query_pool_stages) - bool(pool)
        height, width = (
            side // step**halvings for side, step in zip((height, width), config.query_stride, strict=True)
        )
    side = getattr(block, "window_size", 0)
    fixed = f"it attends in windows of {side}x{side} already" if side else "it pools its queries" if pool else ""
    windows = ceil(height / side) * ceil(width / side) if side else 1
    grid = Grid(side, side) if side else Grid(height, width)
    pooled = pool[0] * pool[1] if pool else 1
    return TowerLayer(name, module, family, module, around(name), grid, windows, pooled, fixed)


def _ordered_layer(name: str, module: Any, family: Family, embedding: Any, size: Size | None) -> TowerLayer:
    """An attention whose tokens are packed, or in blocks; in windows or on the whole grid."""
    config, block = module.config, around(name)
    number = block.rpartition(".")[2]
    height, width = (side // step for side, step in zip(size or _image(config), _pair(config.patch_size), strict=True))
    if family.halved and number.isdigit() and int(number) > config.insert_layer_id:
        height, width = height // 2, width // 2
    prefix, parts = family.prefixes(config)[0], family.part_count(config)
    blocks = family.order(config, height, width)
    if not _in_windows(family, config, number):
        grid = segment((1, height, width), prefix, blocks, parts).grid
        return TowerLayer(name, module, family, embedding, block, grid)
    down, across = blocks.sides[0] if blocks.sides else _pair(config.window_kernel_size)
    windows = ceil(height / down) * ceil(width / across)
    why = f"it attends in windows of {down}x{across} already"
    return TowerLayer(name, module, family, embedding, block, Grid(down, across, prefix), windows, fixed=why)


def _in_windows(family: Family, config: Any, number: str) -> bool:
    """Whether a layer attends in windows. An attention outside the numbered layers merges windows."""
    if not number.isdigit():
        return True
    if family.global_layers:
        return int(number) not in getattr(config, family.global_layers)
    return bool(family.window_layers) and int(number) in getattr(config, family.window_layers)


def _image(config: Any) -> Size:
    """The image size of a configuration, or one of `_ANY` patches a side where a tower takes images of any size."""
    if not hasattr(config, "image_size") and hasattr(config, "num_patches"):  # the tower receives patches
        return (int(config.num_patches**0.5) * config.patch_size,) * 2
    stated = getattr(config, "image_size", None) or getattr(config, "crop_size", None)
    return _pair(stated if stated else [_ANY * side for side in _pair(config.patch_size)])


def _pair(size: Any) -> Size:
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
