"""Recipes of detection and segmentation: those of the published tables, and small ones for two CPU cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from ..errors import UserError, unknown
from ..options import option
from ..train.learning import Learning
from ..train.recipe import replace_fields


@dataclasses.dataclass(frozen=True)
class DenseRecipe(Learning):
    """`size` is the short side of an image in detection, and the training crop in segmentation."""

    epochs: int = option(12, "passes over the data, warm-up included", low=0)
    batch: int = option(16, "images per optimiser step, over all processes", low=1)
    lr: float = option(1e-4, "highest learning rate", low=0)
    weight_decay: float = option(1e-4, "weight decay; biases and norms are exempt", low=0)
    min_lr: float = option(0.0, "lowest learning rate", low=0)
    iterations: int = option(0, "optimiser steps in total, in place of epochs (0: by epochs)", low=0)
    warmup_steps: int = option(0, "optimiser steps of warm-up, in place of warmup (0: by warmup)", low=0)
    schedule: Literal["cosine", "plateau", "constant", "poly", "step"] = option(  # type: ignore[assignment]
        "cosine", "learning rate schedule"
    )
    milestones: tuple[float, ...] = option(
        (8 / 12, 11 / 12), "step: fractions of the run after which lr is divided by 10", low=0, high=1
    )
    scales: tuple[int, ...] = option((), "detection: short sides to draw from in training (empty: size)", low=1)
    longest: int = option(1333, "detection: largest length of the longer side", low=1)
    scale: tuple[float, ...] = option((0.5, 2.0), "segmentation: smallest and largest zoom before the crop", low=0.01)
    distort: bool = option(False, "change brightness, contrast, saturation and hue")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scale) != 2 or self.scale[0] > self.scale[1]:
            raise UserError(f"scale={self.scale}: expected the smallest and the largest zoom, such as 0.5/2")

    def falling(self, per_epoch: int) -> int:
        return self.iterations or super().falling(per_epoch)

    def rising(self, per_epoch: int) -> int:
        return self.warmup_steps or super().rising(per_epoch)

    def steps(self, per_epoch: int) -> int:
        return self.iterations or super().steps(per_epoch)


def retinanet_1x() -> DenseRecipe:
    """RetinaNet, 12 epochs of COCO at 800 px, as PVT's authors train it.

    attendless train pyramid_pvt_small --task detection --weights F --recipe retinanet_1x --data COCO --out DIR
    Expected: AP 40.4 with PVT-Small (from LaViT's poster, not re-run). Time: not measured; requires GPUs.
    """
    return DenseRecipe(epochs=12, schedule="step", warmup_steps=500, size=(800,), longest=1333)


def retinanet_3x() -> DenseRecipe:
    """RetinaNet, 36 epochs, short sides from 640 to 800 px.

    attendless train pyramid_pvt_small --task detection --weights F --recipe retinanet_3x --data COCO --out DIR
    Expected: AP 42.2 with PVT-Small (from LaViT's poster, not re-run). Time: not measured; requires GPUs.
    """
    scales = (640, 672, 704, 736, 768, 800)
    return dataclasses.replace(retinanet_1x(), epochs=36, milestones=(27 / 36, 33 / 36), scales=scales)


def semantic_fpn_80k() -> DenseRecipe:
    """Semantic FPN, 80,000 steps of crops of 512 px.

    attendless train pyramid_pvt_small --task segmentation --weights F --recipe semantic_fpn_80k --data ADE20K --out DIR
    Expected: mIoU 43.2 with PVT-S (from LaViT's poster, not re-run). Time: not measured; requires GPUs.
    """
    return DenseRecipe(iterations=80_000, schedule="poly", size=(512,), distort=True)


def upernet_160k() -> DenseRecipe:
    """UperNet, 160,000 steps of crops of 512 px, as Swin's authors train it, except for the shape of the learning rate schedule.

    attendless train pyramid_swin_tiny --task segmentation --head upernet --weights F --recipe upernet_160k --data ADE20K --out DIR
    Expected: mIoU 44.5 with Swin-T (from LaViT's poster, not re-run). Time: not measured; requires GPUs.
    """  # noqa: E501 (commands are to be copied whole)
    return DenseRecipe(
        iterations=160_000, schedule="poly", warmup_steps=1500, lr=6e-5, weight_decay=0.01, size=(512,), distort=True,
        drop_path=0.2,
    )  # fmt: skip


def small_detection() -> DenseRecipe:
    """For hundreds of images and two cores: 320 px, a short cosine.

    attendless train deit_tiny_patch16_224 --task detection --weights F --data DIR --out DIR
    Expected: docs/results/dense.md. Time: not measured.
    """
    return DenseRecipe(
        epochs=12, batch=4, lr=3e-4, layer_decay=0.8, warmup=1, clip=1.0, size=(320,), longest=512, weight_decay=0.05,
    )  # fmt: skip


def small_segmentation() -> DenseRecipe:
    """For hundreds of images and two cores: 256 px, a short cosine.

    attendless train deit_tiny_patch16_224 --task segmentation --head semantic_fpn:channels=64 --weights F --data DIR --out DIR
    Expected: docs/results/dense.md. Time: not measured.
    """  # noqa: E501 (commands are to be copied whole)
    return DenseRecipe(
        epochs=6, batch=8, lr=1e-3, layer_decay=0.8, warmup=0.5, clip=1.0, size=(256,), scale=(0.8, 1.25),
        weight_decay=0.05,
    )  # fmt: skip


RECIPES: dict[str, dict[str, Callable[[], DenseRecipe]]] = {
    "detection": {make.__name__: make for make in (retinanet_1x, retinanet_3x, small_detection)},
    "segmentation": {make.__name__: make for make in (semantic_fpn_80k, upernet_160k, small_segmentation)},
}
#: The default recipe of each task; a run takes less than an hour on a laptop.
DEFAULT_RECIPES = {"detection": "small_detection", "segmentation": "small_segmentation"}


def dense_recipe(text: str | DenseRecipe, task: str) -> DenseRecipe:
    """Parse `small_detection` or `retinanet_1x:epochs=5`; a `DenseRecipe` is returned unchanged."""
    if isinstance(text, DenseRecipe):
        return text
    name, _, fields = text.partition(":")
    if name not in RECIPES[task]:
        raise unknown(f"recipe of {task}", name, RECIPES[task])
    return replace_fields(RECIPES[task][name](), fields, f"recipe {name}")
