"""Preprocessing and augmentation of images by the settings of a recipe: timm's transforms and mixup.

They draw from the global generators; `attendless.randomness` seeds these for each image and step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image, ImageOps
from timm.data import Mixup, create_transform
from timm.data.mixup import mixup_target
from torch import Tensor
from torchvision import transforms

from ..data.preprocessing import evaluation_transform
from ..randomness import MIX, randomness
from .recipe import Recipe


def train_transform(recipe: Recipe, size: tuple[int, int], mean: Any, std: Any) -> Callable[[Any], Tensor]:
    """timm's training transform with the settings of the recipe."""
    if recipe.crop == "none":
        # No crop: resize and flip only.
        whole: Any = create_transform(
            (3, *size), is_training=True, no_aug=True, mean=mean, std=std, interpolation=_interpolation(recipe)
        )
        return transforms.Compose([transforms.RandomHorizontalFlip(recipe.flip), *whole.transforms])
    jitter: Any = recipe.jitter or None
    made: Any = create_transform(
        (3, *size),
        is_training=True,
        scale=(recipe.crop_scale[0], recipe.crop_scale[1]),
        hflip=recipe.flip,
        color_jitter=jitter,
        auto_augment=recipe.augment or None,
        re_prob=recipe.erase,
        re_mode="pixel",
        mean=mean,
        std=std,
        interpolation=recipe.interpolation,
    )
    for policy in made.transforms:
        for op in getattr(policy, "ops", ()):
            op.aug_fn = _posterize if op.name.startswith("Posterize") else op.aug_fn
    square = [transforms.Resize(size, transforms.InterpolationMode.BILINEAR)] if recipe.crop == "squash" else []
    return transforms.Compose([*square, *made.transforms])


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """At the highest strength timm passes 0 bits, which Pillow rejects; use at least 1."""
    return ImageOps.posterize(image, min(8, max(1, bits)))


def eval_transform(recipe: Recipe, size: tuple[int, int], mean: Any, std: Any) -> Callable[[Any], Tensor]:
    return evaluation_transform(preparation(recipe, size, mean, std))


def preparation(recipe: Recipe, size: tuple[int, int], mean: Any, std: Any) -> dict[str, Any]:
    """Preprocessing for evaluation in timm's keys, also stored in saved files."""
    return {
        "input_size": (3, *size),
        "mean": tuple(mean),
        "std": tuple(std),
        "crop_pct": 1.0 if recipe.crop == "none" else recipe.crop_pct,
        "crop_mode": "squash" if recipe.crop == "squash" else "center",
        "interpolation": _interpolation(recipe),
    }


def _interpolation(recipe: Recipe) -> str:
    return "bicubic" if recipe.interpolation == "random" else recipe.interpolation


class Mix:
    """Labels → soft targets, with mixup or cutmix if the recipe sets them. Draws depend on (seed, step) alone.

    Images are mixed in pairs (i, B-1-i) of the batch; `loader.shares` keeps each pair in one process.
    """

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.seed, self.classes, self.smoothing = recipe.seed, classes, recipe.smoothing
        self.mixup = None
        if recipe.mixup or recipe.cutmix:
            self.mixup = Mixup(
                mixup_alpha=recipe.mixup,
                cutmix_alpha=recipe.cutmix,
                switch_prob=recipe.mix_switch,
                label_smoothing=recipe.smoothing,
                num_classes=classes,
            )

    def __call__(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """images [B, 3, h, w], labels [B] → images, targets [B, classes]."""
        if self.mixup is None:
            return images, mixup_target(labels, self.classes, 1.0, self.smoothing)
        with randomness(MIX, self.seed, step):
            return self.mixup(images, labels)
