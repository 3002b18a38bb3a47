"""What becomes of a picture on its way into a model, as the recipe asks for it: timm's transforms and mixup.

They draw from the global generators; `attendless.randomness` makes every draw a function of where it is used.
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
    """timm's training transform as the recipe asks for it."""
    if recipe.crop == "none":
        # The picture as it is: resized, perhaps mirrored, perhaps with its colours changed.
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
    """timm's own asks for 0 bits at the highest strength, which Pillow refuses; 1 is the least there is."""
    return ImageOps.posterize(image, min(8, max(1, bits)))


def eval_transform(recipe: Recipe, size: tuple[int, int], mean: Any, std: Any) -> Callable[[Any], Tensor]:
    return evaluation_transform(preparation(recipe, size, mean, std))


def preparation(recipe: Recipe, size: tuple[int, int], mean: Any, std: Any) -> dict[str, Any]:
    """How pictures are prepared to judge a model, in timm's words: what evaluation does is what a saved file says."""
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
    """Labels → soft targets, with mixup or cutmix where the recipe asks. Draws depend on (seed, step) alone.

    Pictures are mixed in pairs (i, B-1-i) of the batch; `loader.shares` keeps each pair in one process.
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
