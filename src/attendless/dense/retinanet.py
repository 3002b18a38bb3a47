"""RetinaNet from torchvision's parts: feature pyramid, anchors, focal loss, non-maximum suppression.

The pyramid has strides 8 to 128; P6 comes from the backbone's last map, as published (torchvision
uses P5 if that map is as wide as the pyramid).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

from ..options import Options, option
from .features import Features, pad
from .model import Dense

#: Side of the smallest anchor of a level as a multiple of its stride; scales per octave; aspect ratios.
_ANCHOR, _OCTAVES, _RATIOS = 4, 3, (0.5, 1.0, 2.0)
_PUBLISHED = 256


@dataclasses.dataclass(frozen=True)
class RetinaNetOptions(Options):
    channels: int = option(_PUBLISHED, "width of the feature pyramid and of the head", low=8)
    score: float = option(0.05, "lowest score of a detection", low=0, high=1)
    overlap: float = option(0.5, "largest overlap (IoU) of two detections of a class", low=0, high=1)
    most: int = option(100, "largest number of detections per image", low=1)


class Pyramid(nn.Module):
    """The feature pyramid in the form that torchvision's RetinaNet expects."""

    def __init__(self, features: Features, channels: int) -> None:
        super().__init__()
        self.out_channels = channels
        widths = list(features.channels)[1:]
        self.fpn = FeaturePyramidNetwork(widths, channels, extra_blocks=LastLevelP6P7(widths[-1], channels))

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        return list(self.fpn(OrderedDict((str(i), level) for i, level in enumerate(levels[1:]))).values())


class RetinaNet(Dense):
    """`forward` gives for every image its boxes [n, 4] in pixels (left, top, right, bottom), scores and labels."""

    task, name, options = "detection", "retinanet", RetinaNetOptions

    def __init__(self, features: Features, num_classes: int, options: RetinaNetOptions) -> None:
        super().__init__()
        self.features, self.num_classes, self.chosen = features, num_classes, options
        self.pyramid = Pyramid(features, options.channels)
        sizes = tuple(
            tuple(_ANCHOR * stride * 2 ** (octave / _OCTAVES) for octave in range(_OCTAVES))
            for stride in (8, 16, 32, 64, 128)
        )
        anchors = AnchorGenerator(sizes, (_RATIOS,) * len(sizes))
        self.head = RetinaNetHead(options.channels, anchors.num_anchors_per_location()[0], num_classes)
        for conv in (m for m in self.head.modules() if isinstance(m, nn.Conv2d)):
            # The initialisation is for 256 channels; with fewer, activations would vanish after four layers.
            conv.weight.data.mul_((_PUBLISHED / options.channels) ** 0.5)
        rules = {"score_thresh": options.score, "nms_thresh": options.overlap, "detections_per_img": options.most}
        # For anchor matching, losses and postprocessing. In a list, so that its parameters are not registered twice.
        self._rules = [
            TorchvisionRetinaNet(self.pyramid, num_classes, anchor_generator=anchors, head=self.head, **rules)
        ]

    def decode(self, levels: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        pyramid = self.pyramid(levels)
        return pyramid, self.head(pyramid)

    def outputs(self, images: Tensor) -> tuple[dict[str, Tensor], list[list[Tensor]], dict[str, Tensor]]:
        """Outputs of the head for every anchor, the anchors of each image by level, and extra losses."""
        images = pad(images, self.features.multiple)
        levels, extra = self.features(images)
        pyramid, found = self.decode(levels)
        whole = ImageList(images, [(images.shape[-2], images.shape[-1])] * len(images))
        anchors = self._rules[0].anchor_generator(whole, pyramid)
        counts = [level.shape[-2] * level.shape[-1] * _OCTAVES * len(_RATIOS) for level in pyramid]
        return found, [list(image.split(counts)) for image in anchors], extra

    def losses(self, images: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Targets: `boxes` [n, 4] in pixels of the batch and `labels` [n] for each image."""
        outputs, anchors, extra = self.outputs(images)
        whole = [torch.cat(levels) for levels in anchors]
        found = self._rules[0].compute_loss([dict(target) for target in targets], outputs, whole)
        return {"classes": found["classification"], "boxes": found["bbox_regression"], **extra}

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        outputs, anchors, _ = self.outputs(images)
        counts = [len(level) for level in anchors[0]]
        split = {name: list(value.split(counts, dim=1)) for name, value in outputs.items()}
        return self._rules[0].postprocess_detections(
            split, anchors, [(images.shape[-2], images.shape[-1])] * len(images)
        )
