"""Small things to train on: a folder of pictures, a model that counts its steps, and what a run left behind."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from attendless.train import Run
from attendless.train.log import read_rows

RUN = Run(workers=0, checkpoint_minutes=0.0, log_every=1)
FIELDS = {
    "epochs": 3,
    "batch": 16,
    "size": (16,),
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.1,
    "drop": 0.1,
    "ema": 0.9,
}


def toy_folder(root: Path, train: int = 20, val: int = 7, classes: int = 3) -> Path:
    """Pictures whose class is their strongest colour."""
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 120, (20, 20, 3), dtype=np.uint8)
                pixels[..., label % 3] += 100
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def toy_vit(classes: int = 3, seed: int = 0) -> VisionTransformer:
    torch.manual_seed(seed)
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=classes)


class Counting(VisionTransformer):
    """Appends a byte to $COUNT_STEPS at every training forward, so that steps survive a kill; $FAIL_AT dies there."""

    def forward_features(self, x: Tensor, **more: object) -> Tensor:
        if self.training:
            with open(os.environ["COUNT_STEPS"], "ab", buffering=0) as file:
                file.write(b".")
                if file.tell() == int(os.environ.get("FAIL_AT", "-1")):
                    raise SystemExit("died")
        return super().forward_features(x)


def counting_vit() -> Counting:
    torch.manual_seed(0)
    return Counting(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=3)


def tensors_of(out: Path) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": v for name in ("last", "best") for key, v in load_file(out / f"{name}.safetensors").items()
    }


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file grows beyond `most` bytes while inside: half a write succeeds and the next fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rows_of(out: Path) -> list[dict]:
    """A run's rows, but for how fast it was."""
    return [{k: v for k, v in row.items() if k != "images_per_second"} for row in read_rows(out / "metrics.jsonl")]
