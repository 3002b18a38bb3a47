"""Semantic FPN and UperNet: four maps → a class for every pixel.

semantic_fpn   torchvision's feature pyramid; each level is brought to stride 4 by convolutions and upsampling
               (segmentation_models_pytorch's blocks, with group norms), then all are summed
upernet        segmentation_models_pytorch's decoder: pooled contexts, a pyramid, all levels fused; in training with an
               auxiliary head on the third map. Maps enter without further norms, as in mmsegmentation
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import torch
from segmentation_models_pytorch.base.modules import Conv2dReLU
from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

from ..errors import UserError
from ..options import Options, option
from .features import Features
from .masks import IGNORE_INDEX
from .model import Dense


@dataclasses.dataclass(frozen=True)
class SemanticFPNOptions(Options):
    channels: int = option(256, "width of the feature pyramid; half of it in the branches", low=8)
    drop: float = option(0.1, "dropout before the classifier", low=0, high=1)

    def __post_init__(self) -> None:
        if self.channels % 8:
            raise UserError(f"channels={self.channels}: expected a multiple of 8")


@dataclasses.dataclass(frozen=True)
class UperNetOptions(Options):
    channels: int = option(512, "width of the decoder", low=8)
    aux: float = option(0.4, "weight of the auxiliary loss", low=0)
    drop: float = option(0.1, "dropout before the classifiers", low=0, high=1)


class Segmentor(Dense):
    """`forward` returns logits [B, classes, height, width] at the resolution of the images.

    `decode` returns named logits at some stride, each with the weight of its loss; `pixels` is the prediction.
    """

    task = "segmentation"

    def forward(self, images: Tensor) -> Tensor:
        levels, _ = self.features(images)
        return _as_fine(self.decode(levels)["pixels"][0], images, self.features.multiple)

    def losses(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Targets are classes [B, height, width], or `IGNORE_INDEX`."""
        levels, extra = self.features(images)
        terms = {}
        for name, (logits, weight) in self.decode(levels).items():
            fine = _as_fine(logits, images, self.features.multiple)
            terms[name] = weight * pixel_loss(fine, targets)
        return {**terms, **extra}


class SemanticFPN(Segmentor):
    name, options = "semantic_fpn", SemanticFPNOptions

    def __init__(self, features: Features, num_classes: int, options: SemanticFPNOptions) -> None:
        super().__init__()
        self.features, self.num_classes, self.chosen = features, num_classes, options
        width = options.channels
        self.fpn = FeaturePyramidNetwork(list(features.channels), width)
        self.branches = nn.ModuleList(_branch(width, width // 2, doublings) for doublings in range(4))
        self.drop = nn.Dropout2d(options.drop)
        self.classify = nn.Conv2d(width // 2, num_classes, 1)

    def decode(self, levels: list[Tensor]) -> dict[str, tuple[Tensor, float]]:
        pyramid = self.fpn(OrderedDict((str(i), level) for i, level in enumerate(levels))).values()
        size = levels[0].shape[-2:]
        found = [_resize(branch(level), size) for branch, level in zip(self.branches, pyramid, strict=True)]
        return {"pixels": (self.classify(self.drop(sum(found))), 1.0)}


def _branch(width: int, narrow: int, doublings: int) -> nn.Sequential:
    """Convolutions, each followed by 2× upsampling; for no upsampling, one convolution. Group norms of four channels
    (32 groups at the published width) allow batches of one image and maps of one cell."""
    layers: list[nn.Module] = []
    for i in range(max(1, doublings)):
        conv = nn.Conv2d(narrow if i else width, narrow, 3, padding=1, bias=False)
        layers += [conv, nn.GroupNorm(narrow // 4, narrow), nn.ReLU(inplace=True)]
        if doublings:
            layers.append(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False))
    return nn.Sequential(*layers)


class UperNet(Segmentor):
    name, options = "upernet", UperNetOptions

    def __init__(self, features: Features, num_classes: int, options: UperNetOptions) -> None:
        super().__init__()
        self.features, self.num_classes, self.chosen = features, num_classes, options
        # The decoder expects maps of stride 1 and 2 before ours, and does not use them.
        self.decoder = UPerNetDecoder([3, 3, *features.channels], 5, options.channels)
        self.decoder.feature_norms = nn.ModuleList()
        self.drop = nn.Dropout2d(options.drop)
        self.classify = nn.Conv2d(options.channels, num_classes, 1)
        aux = options.channels // 2
        self.aux = nn.Sequential(
            Conv2dReLU(features.channels[2], aux, 3, padding=1),
            nn.Dropout2d(options.drop),
            nn.Conv2d(aux, num_classes, 1),
        )

    def decode(self, levels: list[Tensor]) -> dict[str, tuple[Tensor, float]]:
        if self.training and len(levels[0]) == 1:
            raise UserError(
                "upernet uses batch norm and cannot train on one image at a time: give a batch of 2 or more"
            )
        unused = levels[0].new_empty(0)
        found = {"pixels": (self.classify(self.drop(self.decoder([unused, unused, *levels]))), 1.0)}
        if self.training and self.chosen.aux:
            found["aux"] = (self.aux(levels[2]), self.chosen.aux)
        return found


def pixel_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the pixels that are not ignored; 0 if there are none."""
    total = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1)


def _as_fine(logits: Tensor, images: Tensor, multiple: int) -> Tensor:
    """Logits of padded images, upsampled to their resolution and cropped to the images before padding."""
    height, width = images.shape[-2:]
    padded = (height + -height % multiple, width + -width % multiple)
    return _resize(logits, padded)[..., :height, :width]


def _resize(x: Tensor, size: Sequence[int] | torch.Size) -> Tensor:
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
