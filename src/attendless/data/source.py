"""The interface of data sets, and decoding of a file to an upright RGB image."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image, ImageOps

from ..errors import UserError

#: The label of an image that could not be read, or that only fills a batch.
IGNORE = -1
Split = Literal["train", "val"]
T = TypeVar("T")
#: EXIF's orientation tag; values from 5 on are rotated by 90 degrees.
_ORIENTATION = 0x0112
#: Largest number of files of a data set that are checked when it is opened.
LOOKED_AT = 2000


class BadImage(UserError):
    """A file that cannot be decoded; the message gives its name and the cause."""


class Source(Protocol):
    """A data set. `classes` is empty without labels; unreadable images raise `BadImage`."""

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Image.Image, Any]: ...

    def name(self, index: int) -> str: ...


def some(files: Sequence[T]) -> Sequence[T]:
    """The files that are checked when a data set is opened: all, or an evenly spaced sample of many."""
    return files[:: -(-len(files) // LOOKED_AT)]


def load_image(
    path: str | Path, *, formats: tuple[str, ...] | None = None, most_pixels: int | None = None
) -> Image.Image:
    """Decode one file to an upright RGB image.

    EXIF rotation is applied; greyscale (8 and 16 bit), palette, CMYK and transparent images become RGB; of an animation
    the first frame is used.

    Args:
        path: The image file.
        formats: Accepted formats (Pillow's names); set this and `most_pixels` for untrusted files.
        most_pixels: Largest number of pixels: a file of some kilobytes can decode to gigabytes.

    Raises:
        BadImage: The file cannot be decoded, or is not accepted.
    """
    try:
        if not os.path.isfile(path):  # reading a pipe would block
            raise OSError("no such file" if not os.path.lexists(path) else "not a regular file")
        with _opened(path, formats) as image:
            if most_pixels is not None and image.width * image.height > most_pixels:
                raise OSError(f"{image.width} × {image.height} pixels: expected at most {most_pixels / 1e6:g} million")
            return upright_rgb(image)
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
        raise BadImage(f"cannot read image {str(path)!r}: {error or type(error).__name__}") from None


def upright_size(path: str | Path) -> tuple[int, int] | None:
    """Width and height of the image that `load_image` returns, from the file's header; None if it cannot be read."""
    if not os.path.isfile(path):
        return None
    try:
        with _opened(path, None) as image:
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
            return (image.height, image.width) if turned else image.size
    except Exception:  # `load_image` reports the cause
        return None


def upright_rgb(image: Image.Image) -> Image.Image:
    """Decode a file that Pillow has opened. Pillow's decoders raise many kinds of errors on damaged files."""
    image.load()
    return _rgb(_upright(image))


def _opened(path: str | Path, formats: tuple[str, ...] | None) -> Image.Image:
    """Open with Pillow, without its warning about large images; Pillow still raises for decompression bombs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=formats)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF in a valid image: do not rotate
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        values = np.asarray(image).astype(np.float64)
        values = values / 257 if values.max(initial=0) > 255 else values
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
