"""A split of a set of images into two disjoint parts by a hash of the file names.

The split depends on the names alone: it is the same on every machine, wherever the folder is, and a file that is added
later moves few others.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from PIL import Image

from .source import Source


@dataclasses.dataclass(frozen=True)
class Part:
    """Some images of a set, with the classes of the whole set."""

    whole: Source
    indices: Sequence[int]

    @property
    def classes(self) -> Sequence[str]:
        return self.whole.classes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> tuple[Image.Image, Any]:
        return self.whole[self.indices[index]]

    def name(self, index: int) -> str:
        return self.whole.name(self.indices[index])


def hold_out(source: Source, most: int) -> tuple[Part, Part]:
    """Up to `most` images, but no more than half of the set, and all others; both in the order of the set."""
    ranked = sorted(range(len(source)), key=lambda i: (_digest(source.name(i)), i))
    count = min(most, len(source) // 2)
    return Part(source, sorted(ranked[:count])), Part(source, sorted(ranked[count:]))


def _digest(name: str) -> bytes:
    """The hash of a file's name and of its folder's."""
    return hashlib.blake2b("/".join(PurePath(name).parts[-2:]).encode(errors="surrogateescape"), digest_size=8).digest()
