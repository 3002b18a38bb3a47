"""Record the sizes of the images that a tower packs into one row of tokens.

A tower of a VLM receives the patches of several images in one row, and the size of each image as an argument. A hook on
the tower records the sizes; a hook on every attention marks where a layer begins. The attention then receives either
the tokens of one image after the other, or those of all images at once, and asks `take` for their grids.

As in `grid_tracking`, sizes are recorded per thread. A layer that gradient checkpointing runs again finds them only if
one recorded call fits its tokens.
"""

from __future__ import annotations

import inspect
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .grid_tracking import GridSize, in_backward, text

#: The images of one call of a tower, in their order in the row.
Row = tuple[GridSize, ...]


class PackedSizes:
    """The sizes of the images of the last call of a tower, in each thread. Its methods `see` and `enter` are hooks."""

    def __init__(self, argument: str, joined: bool = False, halved: bool = False) -> None:
        """Record the images of a tower.

        Args:
            argument: the tower's argument that holds a size for each image: frames, height and width, or height and
                width, in patches; `image_sizes` is in pixels.
            joined: whether the frames of a video attend to each other.
            halved: whether some layers receive tokens of 2 × 2 patches.
        """
        self._arguments = (argument, joined, halved)
        self._here = threading.local()
        self._seen: set[Row] = set()

    @torch.compiler.disable
    def see(self, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook of the tower."""
        argument, joined, _ = self._arguments
        given: dict[str, Any] = _signature(tower).bind_partial(tower, *args, **kwargs).arguments
        sizes, patch = given.get(argument), _side(tower.config.patch_size)
        if sizes is None:  # a batch of images of one size
            pixels = given["pixel_values"]
            rows = [(pixels.shape[-2] // patch, pixels.shape[-1] // patch)] * len(pixels)
        else:
            rows = [tuple(size) for size in (sizes.tolist() if isinstance(sizes, Tensor) else sizes)]
            if argument == "image_sizes":
                rows = [(height // patch, width // patch) for height, width in rows]
        images = [(1, *map(int, size)) if len(size) == 2 else tuple(map(int, size)) for size in rows]
        if joined:
            found = [(frames, height, width) for frames, height, width in images]
        else:
            found = [(1, height, width) for frames, height, width in images for _ in range(frames)]
        self._here.row = tuple(found)
        self._seen.add(tuple(found))

    @torch.compiler.disable
    def enter(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook of an attention."""
        self._here.next = 0

    @torch.compiler.disable
    def take(self, tokens: int, prefix: int) -> Row:
        """The images whose `tokens` an attention receives, each with `prefix` further tokens: the next one, or all."""
        here = self._here
        start: int = getattr(here, "next", 0)
        found = {taken for row in self._rows() if (taken := self._fitting(row, start, tokens, prefix))}
        if len(found) != 1:
            raise UserError(self._why_not(tokens, found))
        here.next = start + 1
        return found.pop()

    def _rows(self) -> list[Row]:
        """The calls of the tower that the tokens may come from."""
        if in_backward():
            return list(self._seen)
        row: Row = getattr(self._here, "row", ())
        return [row] if row else []

    def _fitting(self, row: Row, start: int, tokens: int, prefix: int) -> Row:
        """The images of `row` from `start` on that have this number of tokens; empty if none have."""
        halves = tuple((frames, height // 2, width // 2) for frames, height, width in row)
        for images in (row, halves) if self._arguments[2] else (row,):
            counts = [prefix + frames * height * width for frames, height, width in images]
            if counts[start : start + 1] == [tokens]:
                return images[start : start + 1]
            if start == 0 and sum(counts) == tokens:
                return images
        return ()

    def _why_not(self, tokens: int, found: set[Row]) -> str:
        if in_backward():
            return (
                f"gradient checkpointing runs a layer again, and {len(found)} of the recorded calls have an image of "
                f"{tokens} tokens at this place: train on images of distinct sizes, or without checkpointing"
            )
        sizes = ", ".join(map(text, getattr(self._here, "row", ()))) or "no images"
        return (
            f"the tower received images of {sizes} patches, and {tokens} tokens arrive at an attention: expected those "
            "of the next image, or of all"
        )

    def __reduce__(self) -> tuple[type[PackedSizes], tuple[Any, ...]]:
        """A copy of a model, in this process or another, starts with an empty record."""
        return PackedSizes, self._arguments


def takes(module: nn.Module, argument: str) -> bool:
    """Whether a module's forward has this argument."""
    return argument in _signature(module).parameters


def _signature(module: nn.Module) -> inspect.Signature:
    return _signature_of(type(module).forward)


@cache
def _signature_of(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _side(patch: Any) -> int:
    return int(patch if isinstance(patch, int) else patch[0])
