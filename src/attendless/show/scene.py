"""An image, a model, and the layers, heads and query to show: the input of every figure of `attendless show`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..attention import Grid
from ..convert import convert
from ..convert.exchange import select_layers
from ..errors import UserError
from ..maps import Map, maps, numbers, seen_by_us
from ..maps import layers as all_layers
from ..measure.accuracy import preprocessing
from ..measure.subject import attention_of

Pixel = tuple[float, float]
#: Larger images are downsampled before `pixel_seen` traces their pixels.
_PROBE = 2_000_000


@dataclasses.dataclass(frozen=True)
class Scene:
    """`image` [1, 3, h, w] is the input of `model`; `view` [h, w, 3] is the same without normalisation, 0 to 1. `query`
    is a pixel of the view; `layers` and `heads` are those to show."""

    model: nn.Module
    image: Tensor
    view: np.ndarray
    query: Pixel
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None

    def maps(self, *, dense: bool = False, layers: Sequence[int] | None = None) -> list[Map]:
        """The attention of the query patch in the selected layers."""
        return maps(self.dense if dense else self.model, self.image, layers or self.layers, self.heads, self.query)

    @cached_property
    def dense(self) -> Any:
        """The model with full attention and without token reduction."""
        return with_full_attention(self.model)

    def place(self, grid: Grid) -> tuple[int, int]:
        """Row and column of the query patch."""
        height, width = self.image.shape[-2:]
        return int(self.query[1] * grid.height / height), int(self.query[0] * grid.width / width)

    @property
    def attention_text(self) -> str:
        return attention_of(self.model)

    @property
    def tokens_text(self) -> str:
        return str(getattr(self.model, "tokens", ""))

    @property
    def name(self) -> str:
        """A short name of the model, for titles."""
        return f"{self.attention_text} with {self.tokens_text}" if self.tokens_text else self.attention_text


def scene(
    model: nn.Module,
    picture: Image.Image,
    *,
    size: tuple[int, int],
    crop_pct: float | None = None,
    query: Pixel | None = None,
    layers: str | Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Scene:
    """Preprocess an image for the figures of a model.

    `query` is a pixel of the image file; without it, the centre of the crop is the query. `layers` are numbers, or a
    text such as `0,3-5`, as in `convert`; without them, up to four are shown.
    """
    transform = preprocessing(model, size, crop_pct)
    image = transform(picture)
    seen = (size[1] / 2, size[0] / 2) if query is None else pixel_seen(query, picture.size, transform)
    ours = seen_by_us(model).eval()
    if isinstance(layers, str):
        layers = sorted(select_layers(layers, len(all_layers(ours))))
    shown = spread(numbers(ours, None)) if layers is None else numbers(ours, layers)
    return Scene(
        ours,
        image[None],
        for_eyes(image, transform),
        seen,
        tuple(shown),
        None if heads is None else tuple(heads),
    )


def with_full_attention(model: nn.Module) -> Any:
    """A copy of the model with full attention and without token reduction."""
    return convert(model, "full", tokens="none", below_breakeven="keep").eval()


def spread(layers: Sequence[int], count: int = 4) -> list[int]:
    """Up to `count` layers, evenly spaced from the first to the last."""
    return sorted({layers[round(i * (len(layers) - 1) / max(1, count - 1))] for i in range(count)})


def pixel_seen(pixel: Pixel, size: tuple[int, int], transform: Any) -> Pixel:
    """The position of a pixel (x, y) of an image of `size` (width, height) after the transform.

    Applies the steps of the transform to images of coordinates, so it works for every transform.
    """
    (x, y), (width, height) = pixel, size
    if not (0 <= x < width and 0 <= y < height):
        raise UserError(f"query {x:g},{y:g} is outside the image: expected x,y below {width},{height}")
    shrink = max(1.0, (width * height / _PROBE) ** 0.5)
    small = (max(1, round(width / shrink)), max(1, round(height / shrink)))
    rows, columns = np.mgrid[: small[1], : small[0]].astype(np.float32)
    across = _geometry(transform, columns * (width / small[0]))
    down = _geometry(transform, rows * (height / small[1]))
    far = np.hypot(across - x, down - y)
    row, column = np.unravel_index(int(far.argmin()), far.shape)
    step = max(width / across.shape[1], height / across.shape[0])
    if far[row, column] > 2 * step:
        low, high = f"{across.min():.0f},{down.min():.0f}", f"{across.max():.0f},{down.max():.0f}"
        raise UserError(f"query {x:g},{y:g} is outside the crop: the model sees the image from {low} to {high}")
    return float(column), float(row)


def _geometry(transform: Any, values: np.ndarray) -> np.ndarray:
    """Apply the geometric steps of the transform to values per pixel."""
    found: Any = Image.fromarray(values, mode="F")
    for step in transform.transforms:
        moved = step(found)
        if not isinstance(moved, Image.Image):
            break
        found = moved
    return np.asarray(found)


def for_eyes(image: Tensor, transform: Any) -> np.ndarray:
    """The input of the model [3, h, w] without normalisation: [h, w, 3]."""
    for step in transform.transforms:
        if hasattr(step, "mean") and hasattr(step, "std"):
            mean, std = (torch.as_tensor(value).reshape(-1, 1, 1) for value in (step.mean, step.std))
            image = image * std + mean
    return image.clamp(0, 1).permute(1, 2, 0).numpy()


Draw = Callable[[Scene], Any]
