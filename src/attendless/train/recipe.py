"""Recipes: everything that determines the weights of a run, as one frozen value made by a function.

A recipe is named by a short text, as attentions are (`fair`, `quick:epochs=5,lr=1e-3`). The command line changes fields
by `--set KEY=VALUE`. `Run` holds the rest (workers, checkpoints, logs): changing it changes no weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

from ..errors import UserError, unknown
from ..options import Options, option, parse_options
from ..stamp import cores, most_at_once
from .learning import Learning

O = TypeVar("O", bound=Options)
RANDAUG = "rand-m9-mstd0.5-inc1"


@dataclasses.dataclass(frozen=True)
class Recipe(Learning):
    # Regularisation
    smoothing: float = option(0.0, "label smoothing", low=0, high=1)
    mixup: float = option(0.0, "mixup alpha", low=0)
    cutmix: float = option(0.0, "cutmix alpha", low=0)
    mix_switch: float = option(0.5, "fraction of cutmix where both are on", low=0, high=1)
    # Images
    crop: Literal["random", "squash", "none"] = option(
        "random", "random: random resized crop; squash: the same of a square without aspect ratio; none: no crop"
    )
    crop_scale: tuple[float, ...] = option(
        (0.08, 1.0), "smallest and largest fraction of the area cropped", low=0, high=1
    )
    augment: str = option("", "RandAugment policy in timm's notation, such as rand-m9-mstd0.5-inc1")
    jitter: float = option(0.0, "colour jitter (used where augment is not)", low=0)
    erase: float = option(0.0, "fraction of images with a random rectangle erased", low=0, high=1)
    interpolation: Literal["bicubic", "bilinear", "random"] = option("bicubic", "interpolation of resized images")
    crop_pct: float = option(
        0.875, "evaluation: fraction of the resized image that the centre crop keeps", low=0.01, high=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.crop_scale) != 2:
            raise UserError("crop_scale takes two numbers, such as 0.35/1")
        if (self.mixup or self.cutmix) and self.batch % 2:
            raise UserError(f"batch={self.batch}: mixup and cutmix mix pairs of images, so the batch must be even")


@dataclasses.dataclass(frozen=True)
class Run(Options):
    workers: int = option(-1, "processes that prepare images (-1: as many as suit the machine)", low=-1)
    device: str = option("auto", "auto, cpu, cuda, mps")
    cache: str = option("", "folder for decoded images, which later epochs read without decoding (empty: no cache)")
    checkpoint_minutes: float = option(10.0, "minutes between checkpoints within an epoch", low=0)
    keep: int = option(3, "checkpoints to keep", low=1)
    log_every: int = option(50, "steps between rows of metrics.jsonl", low=1)
    tensorboard: bool = option(False, "also write TensorBoard events")

    def __post_init__(self) -> None:
        if self.workers > most_at_once():
            raise UserError(
                f"workers={self.workers}: expected at most {most_at_once()} on a machine of {cores()} cores"
            )


def deit() -> Recipe:
    """DeiT: 300 epochs of ImageNet-1k with every augmentation.

    attendless train deit_tiny_patch16_224 --recipe deit --data IMAGENET
    Expected: 72.2 top-1 (from the paper, not re-run). Time: not measured; requires GPUs.
    """
    return Recipe(
        epochs=300, cooldown=10, batch=1024, lr=5e-4, lr_batch=512, warmup=5, min_lr=1e-5, drop_path=0.1, smoothing=0.1,
        mixup=0.8, cutmix=1.0, augment=RANDAUG, jitter=0.3, erase=0.25, repeats=3, ema=0.99996,
    )  # fmt: skip


def fair() -> Recipe:
    """The fair comparison of efficient attentions: one recipe for every attention. The poster does not state its number
    of GPUs, so the batch here is that of one GPU.

    attendless train pyramid_fair_patch4_224 --attention full --recipe fair --data IMAGENET
    Expected: 81.80 top-1 (from the paper, not re-run). Time: not measured; requires GPUs.
    """
    return Recipe(
        epochs=300, cooldown=10, batch=128, lr=5e-4, warmup=20, warmup_lr=5e-7, min_lr=5e-6, clip=5.0, drop_path=0.2,
        smoothing=0.1, mixup=0.8, cutmix=1.0, augment=RANDAUG, jitter=0.4, erase=0.25, interpolation="random", seed=42,
    )  # fmt: skip


def evit() -> Recipe:
    """EViT from scratch: DeiT's recipe, with token reduction introduced between epochs 10 and 100.

    attendless train deit_small_patch16_224 --tokens evit:keep=0.7 --recipe evit --data IMAGENET
    Expected: 79.5 top-1 (from Sparsifiner's paper, not re-run). Time: not measured; requires GPUs.
    """
    return dataclasses.replace(deit(), batch=2048, reduce=(10.0, 100.0))


def pvt() -> Recipe:
    """PVT's recipe, for PVT and for LaViT, which publishes none of its own.

    attendless train pyramid_pvt_v2_b1 --recipe pvt --data IMAGENET
    Expected: 78.7 top-1; LaViT-T 79.2 (both from LaViT's poster, not re-run). Time: not measured; requires GPUs.
    """
    return dataclasses.replace(deit(), ema=0.0, jitter=0.4)


def bbvit() -> Recipe:
    """BBViT's recipe for small data sets: Adam at 1e-3, divided by ten when the validation loss stops falling.

    attendless train bbvit_tiny --recipe bbvit --data IMAGENETTE     # its ViT: bbvit_vit_tiny
    Expected: 64.58 top-1 for BBViT and 53.33 for ViT, 3 layers of width 512; 73.85 and 75.89 for bbvit_moderate and
    bbvit_vit_moderate (from the paper, not re-run). Time: days on a CPU; `attendless papers bbvit-2 --time` estimates
    the hours on the machine at hand.
    """
    return Recipe(
        epochs=200, batch=64, optimizer="adam", lr=1e-3, schedule="plateau", patience=10, min_lr=0.0, weight_decay=0.0,
        crop="squash", interpolation="bilinear", crop_pct=1.0, seed=317,
    )  # fmt: skip


def imagenette() -> Recipe:
    """Ten thousand images, ten classes, one CPU core, no pretraining: bf16, averaged weights, label smoothing.

    attendless train pyramid_stem_tiny --recipe imagenette --data IMAGENETTE --set cache=DIR --out runs/imagenette
    Expected: 82.5 top-1, 1.9 M parameters (docs/results/training.md). Time: 44 minutes of a core that has bf16.
    """
    return Recipe(
        epochs=32, batch=64, size=(96,), lr=1.5e-3, warmup=2, min_lr=1e-5, clip=1.0, ema=0.998, drop_path=0.05,
        smoothing=0.1, mixup=0.2, crop_scale=(0.25, 1.0), erase=0.25, crop_pct=1.0, precision="bf16", eval_every=2,
    )  # fmt: skip


def quick() -> Recipe:
    """A first try for a small model on a small data set and a CPU: light augmentation, a short cosine.

    attendless train deit_tiny_patch16_224 --recipe quick --data DIR --size 160
    Expected, and time: not measured yet.
    """
    return Recipe(
        epochs=20, batch=64, lr=1e-3, warmup=2, min_lr=1e-5, clip=1.0, smoothing=0.1, crop_scale=(0.35, 1.0),
    )  # fmt: skip


def finetune() -> Recipe:
    """Fine-tuning of a pretrained model: few epochs, with a learning rate that decays towards the first layer.

    attendless train deit_tiny_patch16_224 --weights F --recipe finetune --data DIR
    Expected: 86.6 on ten classes of 100 images at 96 px, in minutes on one core; with `quick`'s rate 84.6
    (docs/results/training.md).
    """
    return Recipe(
        epochs=5, batch=64, lr=5e-4, layer_decay=0.75, warmup=0.5, min_lr=1e-6, clip=1.0, smoothing=0.1,
        crop_scale=(0.35, 1.0),
    )  # fmt: skip


def scenes() -> Recipe:
    """For the included data set `scenes`, about a minute on a CPU: no augmentation, since colour and position matter.

    attendless train columnar_micro_patch4_32 --data scenes --recipe scenes --out runs/scenes
    Expected: 100 % on three seeds, in about 100 seconds on one core (docs/results/training.md).
    """
    return Recipe(epochs=3, batch=64, lr=2e-3, warmup=0.3, min_lr=1e-5, clip=1.0, crop="none", flip=0.0)


_ALL = (deit, fair, evit, pvt, bbvit, imagenette, quick, finetune, scenes)
RECIPES: dict[str, Callable[[], Recipe]] = {make.__name__: make for make in _ALL}


def recipe(text: str | Recipe) -> Recipe:
    """Parse `quick` or `quick:epochs=5`; a `Recipe` is returned unchanged."""
    if isinstance(text, Recipe):
        return text
    name, _, fields = text.partition(":")
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return replace_fields(RECIPES[name](), fields, f"recipe {name}")


def replace_fields(value: O, text: str, owner: str) -> O:
    """Read `epochs=5,lr=1e-3` into fields of `value`, leaving the others unchanged."""
    given = parse_options(text, type(value), owner)
    named = [item.partition("=")[0] for item in filter(None, text.split(","))]
    return dataclasses.replace(value, **{name: getattr(given, name) for name in named})
