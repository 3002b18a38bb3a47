"""A cache of decoded images on disk, for training on a CPU.

A cache is one file of raw pixels, which every worker maps into memory, and one JSON file with the position of each
image. Its name is a hash of the names, sizes and dates of the images, so changed images get a new cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import UserError
from ..storage import atomic
from .folders import Files
from .scenes import Scenes
from .source import BadImage, Source


@dataclasses.dataclass(frozen=True, eq=False)
class Cached:
    """A source that reads its images from a cache."""

    inner: Source
    path: str
    #: Offset, height and width of each image. An image that cannot be read has height 0.
    places: np.ndarray
    labels: tuple[int, ...]

    @property
    def classes(self) -> Any:
        return self.inner.classes

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def pixels(self) -> np.ndarray:
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        start, height, width = self.places[index].tolist()
        if not height:
            raise BadImage(f"cannot read image {self.name(index)!r}")
        pixels = self.pixels[start : start + height * width * 3].reshape(height, width, 3)
        return Image.fromarray(pixels), self.labels[index]

    def name(self, index: int) -> str:
        return self.inner.name(index)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the mapping: each worker maps the file itself."""
        return {name: value for name, value in self.__dict__.items() if name != "pixels"}


def cached(source: Source, folder: str | Path, say: Callable[[str], None] = lambda text: None) -> Source:
    """`source` with a cache in `folder`, which is created if necessary. Sources that need no decoding are returned
    unchanged.
    """
    if not isinstance(source, Files | Scenes):
        return source
    name = _fingerprint(source)
    pixels, index = Path(folder) / f"{name}.pixels", Path(folder) / f"{name}.json"
    if not index.is_file():
        say(f"decoding {len(source)} images into {str(folder)!r}, once")
        _build(source, pixels, index)
    try:
        content = json.loads(index.read_text())
        places = np.array(content["places"], dtype=np.int64).reshape(-1, 3)
        sound = len(places) == len(content["labels"]) == len(source) and pixels.stat().st_size == content["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(f"the cache {str(index)!r} is damaged: remove it, and it will be created again")
    return Cached(source, str(pixels), places, tuple(content["labels"]))


def _build(source: Source, pixels: Path, index: Path) -> None:
    """Decode in threads, write in order. The index comes last: a cache without one is not there."""
    places, labels, start = [], [], 0
    with atomic(pixels) as temporary, open(temporary, "wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, len(source), 256):
            for array, label in pool.map(lambda i: _decode(source, i), range(first, min(first + 256, len(source)))):
                file.write(array.tobytes())
                places.append([start, *array.shape[:2]])
                labels.append(label)
                start += array.size
    try:
        with atomic(index) as temporary:
            temporary.write_text(json.dumps({"bytes": start, "places": places, "labels": labels}))
    except OSError:  # remove the pixels on a full disk: without an index they are unusable
        pixels.unlink(missing_ok=True)
        raise


def _decode(source: Source, index: int) -> tuple[np.ndarray, int]:
    try:
        image, label = source[index]
    except BadImage:
        return np.empty((0, 0, 3), dtype=np.uint8), 0
    return np.asarray(image), label


def _fingerprint(source: Files | Scenes) -> str:
    found = hashlib.blake2b(digest_size=12)
    if isinstance(source, Scenes):
        found.update(repr(source).encode())
    else:
        for name in source.files:
            try:
                status = os.stat(os.path.join(source.root, name))
                found.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            except OSError:
                found.update(f"{name}\0missing\0".encode())
        found.update(repr((source.labels, source.classes)).encode())
    return found.hexdigest()
