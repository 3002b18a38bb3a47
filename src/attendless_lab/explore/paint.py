"""Draw maps with NumPy and Pillow in the colours of the figures, in milliseconds instead of Matplotlib's second."""

from __future__ import annotations

import base64
import io
from functools import lru_cache

import numpy as np
from PIL import Image
from torch import Tensor

from attendless.show.panels import HEAT, MARK

from .picture import Picture

#: Smaller images are enlarged to about this side, so that the edges of patches stay sharp.
SIDE = 336


def picture(seen: Picture, grid: tuple[int, int], place: tuple[int, int]) -> str:
    """The image with the patch at `place` of `grid` marked, as the `src` of an HTML image."""
    return _source(_marked(_enlarged(seen)[0], grid, place))


def heat(seen: Picture, values: Tensor, place: tuple[int, int], *, most: float | None = None) -> str:
    """A map [rows, columns] over the grey image, scaled from zero to its maximum (or `most`)."""
    shown = values.float().numpy()
    top = float(shown.max(initial=0.0)) if most is None else most
    levels = (np.clip(shown / (top or 1.0), 0, 1) * 255).astype(np.uint8)
    _, grey = _enlarged(seen)
    rows, columns = (np.arange(side) * count // side for side, count in zip(grey.shape, shown.shape, strict=True))
    coloured = _colours()[levels][rows][:, columns]
    mixed = ((72 * coloured + 28 * grey[..., None]) // 100).astype(np.uint8)
    return _source(_marked(mixed, (shown.shape[0], shown.shape[1]), place))


@lru_cache(maxsize=1)
def _colours() -> np.ndarray:
    """The colours of 256 levels, [256, 3], 0 to 255."""
    from matplotlib import colormaps

    return colormaps[HEAT](np.arange(256), bytes=True)[:, :3].astype(np.uint16)


@lru_cache(maxsize=8)
def _enlarged(seen: Picture) -> tuple[np.ndarray, np.ndarray]:
    """The image [h, w, 3] and its grey levels [h, w], 0 to 255."""
    times = max(1, -(-SIDE // max(seen.view.shape[:2])))
    large = (seen.view * 255).round().astype(np.uint8).repeat(times, 0).repeat(times, 1)
    return large, large.mean(-1).astype(np.uint16)


def _marked(image: np.ndarray, grid: tuple[int, int], place: tuple[int, int]) -> np.ndarray:
    """Draw a frame around the patch, orange inside white, which is visible on every colour."""
    (rows, columns), (row, column), (height, width) = grid, place, image.shape[:2]
    top, bottom = row * height // rows, (row + 1) * height // rows
    left, right = column * width // columns, (column + 1) * width // columns
    marked = image.copy()
    for inset, colour in ((0, "#ffffff"), (1, MARK), (4, "")):
        inside = (slice(top + inset, bottom - inset), slice(left + inset, right - inset))
        marked[inside] = [int(colour[i : i + 2], 16) for i in (1, 3, 5)] if colour else image[inside]
    return marked


def _source(image: np.ndarray) -> str:
    held = io.BytesIO()
    Image.fromarray(image).save(held, "JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()
