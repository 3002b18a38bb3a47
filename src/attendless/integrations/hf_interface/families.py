"""Hugging Face's vision towers: which attentions stand in them, where their tokens stand, and what cannot be served.

Every vision tower behind transformers' `AttentionInterface` hands over q, k and v and says nothing of the grid. What a
family puts in front of its patches (class token, registers, queries) and behind them is written down here, by the name
of its attention class, and held against the number of tokens at every call. `transformers` itself is not imported.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

from torch import nn

from ...attention import Grid
from ..grid_tracking import Size, Watch, number


@dataclasses.dataclass(frozen=True)
class Family:
    """How many tokens stand in `front` of the patches (or which numbers may), and how many `behind`, by configuration.

    `own`: the attention is given [B, height, width, C] and no other tokens, so that its input is watched. `turn`: how
    far rotary positions turn keys from one patch to the next, in radians, where that is the same on every grid.
    """

    front: Callable[[Any], tuple[int, ...]]
    behind: Callable[[Any], int] = lambda config: 0
    own: bool = False
    turn: float = 0.0


_BARE = Family(lambda config: (0,))
_CLASS = Family(lambda config: (1,))
_REGISTERS = Family(lambda config: (1 + config.num_register_tokens,))
#: The last layers also see the queries, in front of all others.
_QUERIES = Family(lambda config: tuple(1 + config.num_register_tokens + n for n in (0, config.num_queries)))
_OWN = Family(lambda config: (0,), own=True)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("Aimv2Attention", "IJepaAttention", "JanusVisionAttention", "Ovis2VisionAttention"), _BARE),
    **dict.fromkeys(("SiglipAttention", "VitPoseBackboneSelfAttention"), _BARE),
    **dict.fromkeys(("VideoMAESelfAttention", "Idefics2VisionAttention", "Idefics3VisionAttention"), _BARE),
    **dict.fromkeys(("SmolVLMVisionAttention", "Siglip2Attention"), _BARE),
    **dict.fromkeys(("ViTAttention", "ViTMSNAttention", "Dinov2Attention", "DPTSelfAttention"), _CLASS),
    **dict.fromkeys(("CLIPAttention", "MetaClip2Attention", "AltCLIPAttention", "ChineseCLIPVisionAttention"), _CLASS),
    **dict.fromkeys(("CLIPSegAttention", "OwlViTAttention", "Owlv2Attention", "GitVisionAttention"), _CLASS),
    **dict.fromkeys(("Blip2Attention", "InstructBlipAttention", "Kosmos2VisionAttention"), _CLASS),
    **dict.fromkeys(("InternVLVisionAttention", "VivitAttention"), _CLASS),
    **dict.fromkeys(("Dinov2WithRegistersAttention", "DINOv3ViTAttention", "Sapiens2Attention"), _REGISTERS),
    **dict.fromkeys(("Tipsv2VisionAttention",), _REGISTERS),
    **dict.fromkeys(("EomtAttention", "EomtDinov3Attention", "VideomtAttention"), _QUERIES),
    **dict.fromkeys(("Sam2MultiScaleAttention", "Sam3ViTRoPEAttention"), _OWN),
    "MLCDAttention": Family(lambda config: (1,), turn=1.0),
    "VJEPA2RopeAttention": Family(lambda config: (0,), turn=1.0),
    "DeiTAttention": Family(lambda config: (2,)),
    "PixioAttention": Family(lambda config: (config.n_cls_tokens,)),
    "YolosSelfAttention": Family(lambda config: (1,), lambda config: config.num_detection_tokens),
}

#: What cuts images into patches other than by a convolution: given patches, and `spatial_shapes`.
SHAPED = ("Siglip2VisionEmbeddings",)

_BIAS = "its relative position bias is a mask"
_PACKED = "it packs the patches of images of different sizes into one row"
_ORDER = "its tokens are ordered window by window, not row by row"
_WINDOWS = "it attends in windows already"
_FEWER = "its keys are fewer than its queries already"
_PATCH = "attendless.patch serves it, not transformers' switch"
_EAGER = "it computes its scores itself: build the model with attn_implementation='sdpa'"
_CLOSED = "it is not behind transformers' AttentionInterface"
#: Vision attentions that are known and cannot be served, and why.
REFUSED: dict[str, str] = {
    "ViTMAEAttention": "its encoder sees a random part of the patches, shuffled",
    **dict.fromkeys(("BeitAttention", "Data2VecVisionSelfAttention", "Data2VecVisionSdpaSelfAttention"), _BIAS),
    **dict.fromkeys(("RfDetrDinov2Attention", "LwDetrViTAttention"), _ORDER),
    **dict.fromkeys(("PixtralAttention", "VisionAttention", "Qwen2_5_VLVisionAttention"), _PACKED),
    **dict.fromkeys(("Qwen3VLVisionAttention", "Glm4vVisionAttention", "RadioAttention"), _PACKED),
    **dict.fromkeys(("SwinAttention", "Swinv2SelfAttention", "DonutSwinSelfAttention"), _WINDOWS),
    **dict.fromkeys(("SegformerAttention", "PvtEfficientSelfAttention", "PvtV2SelfAttention"), _FEWER),
    **dict.fromkeys(("SamVisionSdpaAttention", "SamHQVisionSdpaAttention"), _PATCH),
    **dict.fromkeys(("SamVisionAttention", "SamHQVisionAttention"), _EAGER),
    **dict.fromkeys(("VitDetAttention", "HieraMaskUnitAttention", "LevitAttention", "BlipAttention"), _CLOSED),
}


@dataclasses.dataclass
class Place:
    """An attention of a vision tower: its name and module, its family, where its patches are made, which layer it is.

    `block` names what stands around it. `grid` is the one it has at the model's own size; an image has `windows` of
    them, and `pooled` keys for a query. `stays`: why nothing but full attention can stand there.
    """

    name: str
    module: Any
    family: Family
    embedding: nn.Module
    block: str
    grid: Grid
    windows: int = 1
    pooled: int = 1
    stays: str = ""
    index: int = 0
    of: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """The images its model was made for."""
        return _image(self.module.config)

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads, and how wide."""
        config, module = self.module.config, self.module
        heads = module.num_attention_heads if hasattr(module, "num_attention_heads") else config.num_attention_heads
        width = module.dim_out if hasattr(module, "dim_out") else config.hidden_size
        return heads, getattr(module, "head_dim", None) or width // heads


@dataclasses.dataclass(frozen=True)
class Found:
    """The attentions of a model: those that can be served, and, by name, why others cannot."""

    places: tuple[Place, ...]
    left: dict[str, str]


def is_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def find(model: nn.Module, size: tuple[int, int] | None = None) -> Found:
    """Every attention of transformers' inside `model`; grids are for images of `size`, or the configuration's."""
    modules = dict(model.named_modules())
    attentions = {name: module for name, module in modules.items() if _attends(module)}
    known = {name: module for name, module in attentions.items() if type(module).__name__ in FAMILIES}
    towers = _towers(modules, known)
    places, left = [], {}
    for name, module in attentions.items():
        kind = type(module).__name__
        if reason := _why_not(kind, name, towers):
            left[name] = f"{kind}: {reason}"
            continue
        if FAMILIES[kind].own:
            places.append(_own_place(name, module, modules[around(name)], size))
            continue
        family, embedding = FAMILIES[kind], modules[towers[name][0]]
        prefix = min(family.front(module.config)) + family.behind(module.config)
        grid = _grid(_size(embedding, module.config, size), prefix)
        places.append(Place(name, module, family, embedding, around(name), grid))
    for _, tower in itertools.groupby(places, key=lambda place: id(place.module.config)):
        for which, place in enumerate(members := list(tower)):
            place.index, place.of = which, len(members)
    return Found(tuple(places), left)


def grid_of(watch: Watch, family: Family, config: Any, tokens: int) -> Grid:
    """The grid that so many tokens stand on now, those behind the patches counted among the prefix."""
    tokens, behind, front = number(tokens), family.behind(config), family.front(config)
    size = watch.size(tuple(tokens - behind - count for count in front))
    return _grid(size, tokens - size[0] * size[1] * size[2])


def _grid(size: Size, prefix: int) -> Grid:
    return Grid(size[1], size[2], prefix, depth=size[0])


def _attends(module: nn.Module) -> bool:
    """Whether this is the innermost module called an attention."""
    named = [m for m in module.modules() if "Attention" in type(m).__name__ and is_transformers(m)]
    return len(named) == 1 and named[0] is module and not type(module).__name__.endswith("Output")


def _towers(modules: dict[str, nn.Module], known: dict[str, Any]) -> dict[str, list[str]]:
    """For each attention in a vision tower, what could make its patches.

    A tower is the smallest part of the model that holds such a module and attentions too.
    """
    found: dict[str, list[str]] = {}
    for name, module in modules.items():
        if not (_cuts(module) or type(module).__name__ in SHAPED):
            continue
        inside = next((here for part in _parts(name) if (here := [n for n in known if _in(n, part)])), [])
        for attention in inside:
            channels = getattr(known[attention].config, "num_channels", 3)
            if getattr(module, "in_channels", channels) == channels:
                found.setdefault(attention, []).append(name)
    return found


def _cuts(module: nn.Module) -> bool:
    """Whether this may be what cuts images into patches."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d):
        return False
    return tuple(module.kernel_size) == tuple(module.stride) and max(module.stride) > 1


def _why_not(kind: str, name: str, towers: dict[str, list[str]]) -> str | None:
    if kind in REFUSED:
        return REFUSED[kind]
    if kind not in FAMILIES:
        return "not a vision attention that is known"
    if FAMILIES[kind].own:
        return None
    if name not in towers:
        return "it stands in no vision tower"
    return None if len(towers[name]) == 1 else f"several modules may make its patches: {', '.join(towers[name])}"


def _parts(name: str) -> Iterator[str]:
    """The modules that hold a module, from the innermost to the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _in(name: str, part: str) -> bool:
    return not part or name.startswith(f"{part}.")


def around(name: str) -> str:
    """The block an attention stands in: the innermost part with a number."""
    return next((part for part in _parts(name) if part.rpartition(".")[2].isdigit()), name.rpartition(".")[0])


def _size(embedding: Any, config: Any, size: tuple[int, int] | None) -> Size:
    """The grid of an image of `size`, or of the configuration's."""
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


def _own_place(name: str, module: Any, block: Any, size: tuple[int, int] | None) -> Place:
    """An attention of SAM 2's or 3's pyramid, in windows or not."""
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
    stays = f"it attends in windows of {side}x{side} already" if side else "it pools its queries" if pool else ""
    windows = ceil(height / side) * ceil(width / side) if side else 1
    grid = Grid(side, side) if side else Grid(height, width)
    pooled = pool[0] * pool[1] if pool else 1
    return Place(name, module, _OWN, module, around(name), grid, windows, pooled, stays)


def _image(config: Any) -> tuple[int, int]:
    if not hasattr(config, "image_size") and hasattr(config, "num_patches"):  # images of any shape, cut beforehand
        return (int(config.num_patches**0.5) * config.patch_size,) * 2
    return _pair(getattr(config, "image_size", None) or config.crop_size)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
