"""Isotropic backbones with a convolutional stem, whose residual branches are divided by a constant.

    stem      7 × 7 at stride 2, then 3 × 3, each with BatchNorm and ReLU; then patches of half the size
    blocks    x + branch(norm x) / skip

LV-ViT and DeepViT are such backbones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Grid
from ..errors import UserError
from .columnar import ColumnarBackbone


class ConvStem(PatchEmbed):
    """timm's patch embedding after convolutions of `stem` channels, the first of which halves the image."""

    def __init__(
        self, *, stem: int, kernels: Sequence[int] = (7, 3, 3), in_chans: int = 3, embed_dim: int = 768, **kwargs: Any
    ) -> None:
        super().__init__(in_chans=in_chans, embed_dim=embed_dim, **kwargs)
        if any(side % 2 for side in self.patch_size):
            raise UserError(f"patch_size={self.patch_size}: the stem halves the image, so patches must be even")
        made: dict[str, Any] = {name: kwargs.get(name) for name in ("device", "dtype")}
        biased = self.proj.bias is not None
        del self.proj  # registered again below, after the stem, so that modules are listed in order of use
        self.kernels = tuple(kernels)
        for number, kernel in enumerate(self.kernels, start=1):
            channels, stride = (in_chans, 2) if number == 1 else (stem, 1)
            conv = nn.Conv2d(channels, stem, kernel, stride, padding=kernel // 2, bias=False, **made)
            setattr(self, f"conv{number}", conv)
            setattr(self, f"bn{number}", nn.BatchNorm2d(stem, **made))
        half = (self.patch_size[0] // 2, self.patch_size[1] // 2)
        self.proj = nn.Conv2d(stem, embed_dim, half, half, bias=biased, **made)

    @property
    def convolutions(self) -> list[tuple[Any, Any]]:
        """The convolutions of the stem, each with its norm."""
        return [
            (getattr(self, f"conv{number}"), getattr(self, f"bn{number}"))
            for number, _ in enumerate(self.kernels, start=1)
        ]

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[-2], x.shape[-1])
        if self.strict_img_size and size != self.img_size:
            raise UserError(f"images of {size} were given to a model for {self.img_size}: resize them, or the model")
        over = [-side % patch for side, patch in zip(size, self.patch_size, strict=True)]
        if any(over) and not self.dynamic_img_pad:
            raise UserError(f"images of {size} do not divide into patches of {self.patch_size}")
        x = F.pad(x, (0, over[1], 0, over[0]))
        for conv, norm in self.convolutions:
            x = F.relu(norm(conv(x)))
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1))

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        if patch_size is not None and patch_size != self.patch_size:
            raise UserError(f"patch_size={patch_size}: the size of a convolutional stem is fixed at {self.patch_size}")
        super().set_input_size(img_size=img_size)

    def macs(self, grid: Grid) -> int:
        """MACs of one image: the stem at half the resolution, the projection on every patch."""
        pixels = grid.patches * self.proj.kernel_size[0] * self.proj.kernel_size[1]
        stem = sum(conv.weight.numel() for conv, _ in self.convolutions)
        return pixels * stem + grid.patches * self.proj.weight.numel()


class Skip(nn.Module):
    """Divides a branch by a constant, in the place of LayerScale."""

    def __init__(self, skip: float) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        return x / self.skip

    def extra_repr(self) -> str:
        return f"skip={self.skip:g}"


class Stemmed(ColumnarBackbone, VisionTransformer):
    """`stem` is the width of the stem's convolutions, `skip` the divisor of each residual branch."""

    def __init__(
        self, *args: Any, stem: int = 64, kernels: Sequence[int] = (7, 3, 3), skip: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, embed_layer=partial(ConvStem, stem=stem, kernels=kernels), **kwargs)
        self.stem, self.skip = stem, skip
        if skip != 1:
            for block in self.blocks:
                block.ls1, block.ls2 = Skip(skip), Skip(skip)

    def embedding_macs(self, grid: Grid) -> int:
        return self.patch_embed.macs(grid)
