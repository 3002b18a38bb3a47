"""Transforms of images with boxes or masks, from torchvision.

They draw from PyTorch's global generator, which is seeded for each image (`attendless.randomness`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.transforms import v2

from ..train.loader import Prepared
from .masks import IGNORE_INDEX
from .recipes import DenseRecipe

#: Before zoom and crop, the long side of an image is at most this multiple of the crop.
_LONGEST = 4


def to_pixels(image: Image.Image) -> tv_tensors.Image:
    return tv_tensors.Image(torch.from_numpy(np.array(image)).permute(2, 0, 1))


def normalise(mean: Sequence[float], std: Sequence[float]) -> list[Any]:
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]


class Sized(v2.Transform):
    """Resizes the short side to one of `sides`, or the long side to `longest` if it would exceed that, then zooms by a
    random factor within `zoom`. Every side is at least one pixel."""

    def __init__(self, sides: Sequence[int], longest: int, zoom: tuple[float, ...] = (1.0, 1.0)) -> None:
        super().__init__()
        self.sides, self.longest, self.zoom = sides, longest, zoom

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        side = self.sides[int(torch.randint(len(self.sides), ()))] if len(self.sides) > 1 else self.sides[0]
        ratio = min(side / min(height, width), max(self.longest, side) / max(height, width))
        low, high = self.zoom
        ratio *= low + float(torch.rand(1)) * (high - low) if high > low else low
        return {"size": [max(1, int(now * ratio + 1e-6)) for now in (height, width)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(v2.functional.resize, inpt, size=params["size"], antialias=True)


def boxes_to_learn(recipe: DenseRecipe, size: int, mean: Any, std: Any) -> v2.Compose:
    return v2.Compose(
        [
            Sized(recipe.scales or (size,), recipe.longest),
            v2.RandomHorizontalFlip(recipe.flip),
            *([v2.RandomPhotometricDistort()] if recipe.distort else []),
            v2.ClampBoundingBoxes(),
            v2.SanitizeBoundingBoxes(min_size=1),
            *normalise(mean, std),
        ]
    )


def masks_to_learn(recipe: DenseRecipe, size: tuple[int, int], mean: Any, std: Any) -> v2.Compose:
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE_INDEX}
    return v2.Compose(
        [
            Sized((min(size),), _LONGEST * min(size), recipe.scale),
            v2.RandomCrop(size, pad_if_needed=True, fill=fill),
            v2.RandomHorizontalFlip(recipe.flip),
            *([v2.RandomPhotometricDistort()] if recipe.distort else []),
            *normalise(mean, std),
        ]
    )


def to_judge(size: int, longest: int, mean: Any, std: Any) -> v2.Compose:
    return v2.Compose([Sized((size,), longest), *normalise(mean, std)])


def padded(images: Sequence[Tensor]) -> Tensor:
    """Images of several sizes as one batch [B, 3, h, w], with zeros on the right and at the bottom."""
    height, width = (max(image.shape[side] for image in images) for side in (-2, -1))
    return torch.stack([F.pad(i, (0, width - i.shape[-1], 0, height - i.shape[-2])) for i in map(_plain, images)])


def _plain(image: Tensor) -> Tensor:
    return image.as_subclass(Tensor)


@dataclasses.dataclass(frozen=True)
class WithBoxes(Prepared):
    """Targets: boxes in pixels of the transformed image, labels, the index of the image, and its size before and
    after."""

    def prepare(self, image: Any, label: Any) -> tuple[Tensor, Any]:
        before = (image.height, image.width)
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(label["boxes"]), format="XYXY", canvas_size=before)
        given = {"boxes": boxes, "labels": torch.from_numpy(label["labels"])}
        pixels, target = self.transform(to_pixels(image), given)  # type: ignore[call-arg]
        after = (pixels.shape[-2], pixels.shape[-1])
        return pixels, {
            "boxes": target["boxes"].as_subclass(Tensor).float(),
            "labels": target["labels"],
            "index": torch.tensor(label["index"]),
            "sizes": torch.tensor([before, after]),
        }

    def stack(self, images: Sequence[Tensor], labels: Sequence[Any]) -> tuple[Tensor, Any]:
        return padded(images), list(labels)


@dataclasses.dataclass(frozen=True)
class WithMasks(Prepared):
    """Crops of one size, and the class of every pixel."""

    def prepare(self, image: Any, label: Any) -> tuple[Tensor, Any]:
        pixels, mask = self.transform(to_pixels(image), tv_tensors.Mask(torch.from_numpy(label)))  # type: ignore[call-arg]
        return _plain(pixels), mask.as_subclass(Tensor).long()

    def stack(self, images: Sequence[Tensor], labels: Sequence[Any]) -> tuple[Tensor, Any]:
        return padded(images), torch.stack(list(labels))


@dataclasses.dataclass(frozen=True)
class WholeMasks(WithMasks):
    """Uncropped validation images of several sizes, each with the mask of its file and its size."""

    def prepare(self, image: Any, label: Any) -> tuple[Tensor, Any]:
        pixels = _plain(self.transform(to_pixels(image)))
        return pixels, {"mask": torch.from_numpy(label), "size": torch.tensor(pixels.shape[-2:])}

    def stack(self, images: Sequence[Tensor], labels: Sequence[Any]) -> tuple[Tensor, Any]:
        return padded(images), list(labels)
