"""A set of pictures, and how one file becomes an upright RGB picture."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image, ImageOps

from ..errors import UserError

#: The label of a picture that is not there: it could not be read, or it only fills up a batch.
IGNORE = -1
Split = Literal["train", "val"]
T = TypeVar("T")
#: EXIF's number for how a camera was held: from 5 on, on its side.
_ORIENTATION = 0x0112
#: The most files of a set that are looked at when it is opened.
LOOKED_AT = 2000


class BadImage(UserError):
    """A file that cannot be decoded; the text names it and says why."""


class Source(Protocol):
    """A set of pictures. `classes` is empty where nothing is labelled; unreadable pictures raise `BadImage`."""

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Image.Image, Any]: ...

    def name(self, index: int) -> str: ...


def some(files: Sequence[T]) -> Sequence[T]:
    """Those of a set's files that are looked at when it is opened: all, or of many some, spread over the set."""
    return files[:: -(-len(files) // LOOKED_AT)]


def load_image(
    path: str | Path, *, formats: tuple[str, ...] | None = None, most_pixels: int | None = None
) -> Image.Image:
    """Decode one file into an upright RGB picture, or raise `BadImage`.

    EXIF rotation is applied; greyscale (8 and 16 bit), palette, CMYK and transparent pictures become RGB; of a moving
    one the first picture is taken. Whoever does not know where a file comes from says which `formats` (Pillow's names)
    and how many pixels he takes: a file of some kilobytes can hold gigabytes of them.
    """
    try:
        if not os.path.isfile(path):  # a pipe would wait for ever
            raise OSError("no such file" if not os.path.lexists(path) else "not a regular file")
        with _opened(path, formats) as image:
            if most_pixels is not None and image.width * image.height > most_pixels:
                raise OSError(f"{image.width} × {image.height} pixels, at most {most_pixels / 1e6:g} million are taken")
            return upright_rgb(image)
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
        raise BadImage(f"cannot read image {str(path)!r}: {error or type(error).__name__}") from None


def upright_size(path: str | Path) -> tuple[int, int] | None:
    """Width and height of the picture that `load_image` would give, by the file's header alone; None without one."""
    if not os.path.isfile(path):
        return None
    try:
        with _opened(path, None) as image:
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
            return (image.height, image.width) if turned else image.size
    except Exception:  # said, with its reason, by whoever loads it
        return None


def upright_rgb(image: Image.Image) -> Image.Image:
    """The pixels of a file that Pillow has opened. Its decoders raise nearly everything on damaged files."""
    image.load()
    return _rgb(_upright(image))


def _opened(path: str | Path, formats: tuple[str, ...] | None) -> Image.Image:
    """As Pillow does, which raises for what must be meant to harm, without its warning about what is merely large."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=formats)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF in a sound picture: take the pixels as they are
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        values = np.asarray(image).astype(np.float64)
        values = values / 257 if values.max(initial=0) > 255 else values
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
