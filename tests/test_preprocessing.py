"""The evaluation transform: timm's pixels for ordinary images, and bounded memory for thin ones."""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from attendless.data.preprocessing import THINNEST, CropThin, evaluation_transform
from attendless.errors import UserError


def config(size: tuple[int, int] = (64, 64), **changes: Any) -> dict[str, Any]:
    found = {"input_size": (3, *size), "crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic"}
    return found | {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)} | changes


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
@pytest.mark.parametrize("side", [(100, 80), (80, 100), (7, 7 * THINNEST), (20 * THINNEST, 20), (1, 1)])
def test_ordinary_images_have_the_pixels_of_timm(side: tuple[int, int], size: tuple[int, int], mode: str) -> None:
    chosen = config(size, crop_mode=mode)
    picture = noise(*side)
    assert torch.equal(evaluation_transform(chosen)(picture), create_transform(**chosen, is_training=False)(picture))


@pytest.mark.parametrize("side", [(501, 3), (500, 3), (4, 777)])
def test_the_centre_of_thin_images_has_the_pixels_of_timm(side: tuple[int, int]) -> None:
    picture = noise(*side)
    found, theirs = (t(picture) for t in (evaluation_transform(config()), create_transform(**config())))
    assert (found - theirs).abs().mean() < 0.1  # of values from -2 to 3: rounding moves the crop by less than a pixel


def test_the_crop_keeps_the_centre() -> None:
    for width in (2000, 2001):
        cut = CropThin(32)(noise(width, 3))
        assert cut.height == 3
        assert cut.width in (96, 97)
        assert (width - cut.width) % 2 == 0


@pytest.mark.parametrize("side", [(60_000, 1), (1, 60_000)])
@pytest.mark.parametrize("mode", ["center", "border"])
def test_thin_images_take_little_memory(side: tuple[int, int], mode: str) -> None:
    picture, transform = Image.new("RGB", side), evaluation_transform(config((224, 224), crop_mode=mode))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert transform(picture).shape == (3, 224, 224)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("crop_pct", [1e-9, float("nan")])
def test_a_crop_that_would_scale_beyond_reason(crop_pct: float) -> None:
    with pytest.raises(UserError, match="before the crop: expected at most"):
        evaluation_transform(config(crop_pct=crop_pct))
