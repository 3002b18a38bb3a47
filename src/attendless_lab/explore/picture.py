"""An uploaded image: which files are accepted, and the input of the model."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from attendless.data.source import BadImage, load_image
from attendless.show.scene import for_eyes

MOST_BYTES, MOST_PIXELS = 20 << 20, 50_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image: `image` [1, 3, h, w] is the model's input, `view` [h, w, 3] the same for display, 0 to 1. Equal images
    have equal `key`."""

    key: str
    image: Tensor = dataclasses.field(compare=False, repr=False)
    view: np.ndarray = dataclasses.field(compare=False, repr=False)


def take(path: str | Path, transform: Callable[[Any], Tensor]) -> Picture:
    """Read and preprocess an untrusted image file; raises `BadImage` with the reason if it is not accepted."""
    if os.path.isfile(path) and os.path.getsize(path) > MOST_BYTES:
        megabytes = os.path.getsize(path) / (1 << 20)
        most = f"at most {MOST_BYTES >> 20} MB are accepted"
        raise BadImage(f"cannot read image {Path(path).name!r}: {megabytes:.1f} MB, {most}")
    try:
        return prepare(load_image(path, formats=FORMATS, most_pixels=MOST_PIXELS), transform)
    except BadImage as error:  # do not disclose the path of the upload
        raise BadImage(str(error).replace(str(path), Path(path).name)) from None


def prepare(picture: Image.Image, transform: Callable[[Any], Tensor]) -> Picture:
    image = transform(picture)
    key = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    return Picture(key, image[None], for_eyes(image, transform))


def first_picture() -> Image.Image:
    """The image at the start of the page: a photograph in the public domain that is part of Matplotlib (Rear Admiral
    Grace Hopper, U.S. Navy)."""
    from matplotlib import cbook

    return load_image(str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)))
