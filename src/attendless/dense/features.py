"""Backbones as feature pyramids: images of any size → four maps, each with half the resolution of the one before.

    hierarchical backbone   its stages of strides 4, 8, 16 and 32, each with a norm if the authors use one (Swin, but
                            not PVT); a class token is dropped
    isotropic ViT           its last map, with dropped and merged tokens restored to the grid, upsampled by transposed
                            convolutions and downsampled by pooling, as in ViTDet

Images are padded on the right and at the bottom to a multiple of every stride.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from timm.layers import LayerNorm2d
from timm.layers.format import Format
from torch import Tensor, nn
from torch.nn import functional as F

from ..backbones import Pyramid
from ..backbones.columnar import ColumnarBackbone
from ..backbones.stem import to_map
from ..convert import open_model
from ..errors import UserError
from ..integrations.weights import reset_classifier

#: The strides of the four maps in pixels; approximate if the patch size is not a power of two.
STRIDES = (4, 8, 16, 32)


class Maps(NamedTuple):
    """Four maps [B, C, h, w], the finest first, and the losses that attentions define."""

    levels: list[Tensor]
    losses: dict[str, Tensor]


class Features(nn.Module):
    """A backbone without classifier, and the layers that make four maps of its tokens. `channels` are their widths."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.make: Any
        if isinstance(backbone, ColumnarBackbone):
            any_size(backbone)
            backbone.use_tail(False)  # the head needs the patch tokens
            self.make = SimplePyramid(backbone.embed_dim, backbone.patch_embed.patch_size[0])
            self.channels: Sequence[int] = self.make.channels
            self.multiple = math.lcm(*backbone.patch_embed.patch_size, self.make.coarsest)
        else:
            self.stages = pyramid_stages(backbone)
            self.channels = [backbone.feature_info[i]["num_chs"] for i in self.stages]
            norm: Callable[[int], nn.Module] = nn.Identity
            if isinstance(backbone, Pyramid):
                backbone.drop_class_token()
                if backbone.style.norms_maps:
                    norm = partial(LayerNorm2d, eps=backbone.style.norm_eps)
            self.make = nn.ModuleList(norm(width) for width in self.channels)
            self.multiple = STRIDES[-1]

    def forward(self, images: Tensor) -> Maps:
        images = pad(images, self.multiple)
        if isinstance(self.backbone, ColumnarBackbone):
            x, context = self.backbone.forward_context(images)
            return Maps(self.levels([to_map(context.grid.restore(x), context.grid)]), context.extra())
        if isinstance(self.backbone, Pyramid):
            found, context = self.backbone.stage_maps(images)
            return Maps(self.levels([found[i] for i in self.stages]), context.extra())
        found = self.backbone.forward_intermediates(images, intermediates_only=True)
        return Maps(self.levels([found[i] for i in self.stages]), {})

    def levels(self, found: Sequence[Tensor]) -> list[Tensor]:
        """The maps of the backbone → the four maps."""
        if isinstance(self.make, SimplePyramid):
            return cast(list[Tensor], self.make(found[0]))
        return [norm(level) for norm, level in zip(self.make, found, strict=True)]

    def empty(self, size: tuple[int, int], batch: int = 1) -> list[Tensor]:
        """The backbone's maps for images of `size` on the meta device, to count the MACs of the head."""
        if isinstance(self.make, SimplePyramid):
            grid = self.backbone.grid(size)
            return [torch.empty(batch, self.backbone.embed_dim, grid.height, grid.width, device="meta")]
        sides = [[-(-side // stride) for side in size] for stride in STRIDES]
        return [torch.empty(batch, width, *hw, device="meta") for width, hw in zip(self.channels, sides, strict=True)]


def extractor(
    model: str, attention: str | None = None, size: int | tuple[int, int] | None = None, **more: Any
) -> Features:
    """Open a backbone as a feature extractor, which computes four maps of strides 4, 8, 16 and 32.

    Args:
        model: A name, file or folder for `open_model`.
        attention: The attention to convert to; default: full attention.
        size: Input size; default: the model's own. The extractor accepts images of any size.
        more: Further arguments of `open_model`, such as `weights` and `tokens`.
    """
    built = open_model(model, attention=attention or "full", size=size, below_breakeven="keep", **more)
    reset_classifier(built, 0)
    return Features(built).eval()


class SimplePyramid(nn.Module):
    """One map with patches of `patch` pixels → four maps; for patches of 16 pixels, strides 4 to 32."""

    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        finer = max(0, round(math.log2(patch / STRIDES[0])))
        #: How often each level is upsampled by 2; negative: downsampled.
        self.doubled = [finer - i for i in range(len(STRIDES))]
        self.levels = nn.ModuleList(_upsample(dim, times) for times in self.doubled)
        self.channels = [dim >> max(0, times) for times in self.doubled]
        #: Side of a cell of the last level in pixels.
        self.coarsest = patch << max(0, -self.doubled[-1])

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for level, times in zip(self.levels, self.doubled, strict=True):
            maps.append(level(x) if times >= 0 else F.max_pool2d(x, 1 << -times))
        return maps


def _upsample(dim: int, times: int) -> nn.Sequential:
    """Repeated 2× upsampling that halves the width, with a norm and GELU in between."""
    layers: list[nn.Module] = []
    for i in range(times):
        if i:
            layers += [LayerNorm2d(dim >> i), nn.GELU()]
        layers.append(nn.ConvTranspose2d(dim >> i, dim >> (i + 1), 2, stride=2))
    return nn.Sequential(*layers)


def pad(images: Tensor, multiple: int) -> Tensor:
    """Images [B, C, h, w] zero-padded on the right and at the bottom to multiples of `multiple`."""
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % multiple, 0, -height % multiple))


def any_size(model: Any) -> None:
    """Let an isotropic model accept images of any size, by resampling its position embeddings for each."""
    model.dynamic_img_size = True
    model.patch_embed.strict_img_size = False
    model.patch_embed.flatten = False
    model.patch_embed.output_fmt = Format.NHWC


def pyramid_stages(model: nn.Module) -> list[int]:
    """Indices of the stages with the four strides."""
    info = getattr(model, "feature_info", None) if hasattr(model, "forward_intermediates") else None
    known = {stage["reduction"]: i for i, stage in enumerate(info or ())}
    if not set(STRIDES) <= known.keys():
        found = f"has maps of stride {', '.join(map(str, known))}" if known else "returns no maps"
        raise UserError(
            f"{type(model).__name__} cannot be a backbone of detection or segmentation: expected an isotropic ViT, "
            f"or a hierarchical model with maps of stride 4, 8, 16 and 32; this one {found}"
        )
    return [known[stride] for stride in STRIDES]
