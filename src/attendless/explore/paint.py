"""Pictures by NumPy and Pillow, in the colours of the figures: milliseconds, where a figure takes a second."""

from __future__ import annotations

import base64
import io
from functools import lru_cache

import numpy as np
from PIL import Image
from torch import Tensor

from ..show.panels import HEAT, MARK

#: Smaller pictures are enlarged to about this side, so that a patch's edges stay sharp.
SIDE = 336


def picture(view: np.ndarray, grid: tuple[int, int], place: tuple[int, int]) -> str:
    """The picture [h, w, 3] with the patch at `place` of `grid` marked, as the `src` of an HTML image."""
    return _source(_marked(_enlarged(view), grid, place))


def heat(view: np.ndarray, values: Tensor, place: tuple[int, int], *, most: float | None = None) -> str:
    """A map [rows, columns] over the greyed picture, from nothing to its most (or `most`)."""
    shown = values.float().numpy()
    top = float(shown.max(initial=0.0)) if most is None else most
    large = _enlarged(view)
    levels = (np.clip(shown / (top or 1.0), 0, 1) * 255).astype(np.uint8)
    rows = np.arange(large.shape[0]) * shown.shape[0] // large.shape[0]
    columns = np.arange(large.shape[1]) * shown.shape[1] // large.shape[1]
    coloured = _colours()[levels][rows][:, columns]
    mixed = 0.28 * large.mean(-1, keepdims=True) + 0.72 * coloured
    return _source(_marked(mixed, (shown.shape[0], shown.shape[1]), place))


@lru_cache(maxsize=1)
def _colours() -> np.ndarray:
    """Of 256 levels, [256, 3]."""
    from matplotlib import colormaps

    return colormaps[HEAT](np.arange(256))[:, :3].astype(np.float32)


def _enlarged(view: np.ndarray) -> np.ndarray:
    times = max(1, -(-SIDE // max(view.shape[:2])))
    return view.repeat(times, 0).repeat(times, 1)


def _marked(image: np.ndarray, grid: tuple[int, int], place: tuple[int, int]) -> np.ndarray:
    """With a frame around the patch."""
    (rows, columns), (row, column), (height, width) = grid, place, image.shape[:2]
    top, bottom = row * height // rows, (row + 1) * height // rows
    left, right = column * width // columns, (column + 1) * width // columns
    thick = max(2, SIDE // 110)
    marked = image.copy()
    inside = marked[top + thick : bottom - thick, left + thick : right - thick].copy()
    marked[top:bottom, left:right] = np.array([int(MARK[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    marked[top + thick : bottom - thick, left + thick : right - thick] = inside
    return marked


def _source(image: np.ndarray) -> str:
    held = io.BytesIO()
    Image.fromarray((image * 255).round().astype(np.uint8)).save(held, "JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()
