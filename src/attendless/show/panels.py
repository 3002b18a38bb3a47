"""Parts of figures: a sheet of panels, the image, an overlaid map, the query patch.

The colour map is readable with colour vision deficiency: dark blue is low, yellow is high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..attention import Grid
from .figures import new_figure
from .scene import Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAT, MARK = "cividis", "#d55e00"


def sheet(rows: int, columns: int, title: str = "", cell: float = 1.7) -> tuple[Figure, Any]:
    """A figure and its panels [rows, columns], without axes."""
    figure = new_figure(max(3.2, cell * columns + 0.6), cell * rows + (0.9 if title else 0.4))
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure, panels


def heads_of(panels: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Titles above the columns and beside the rows."""
    for axes, text in zip(panels[0], columns, strict=True):
        axes.set_title(text, fontsize=8)
    for axes, text in zip(panels[:, 0], rows, strict=True):
        axes.set_ylabel(text, fontsize=8)


def picture(axes: Any, scene: Scene, grid: Grid | None = None) -> None:
    """Draw the image and the query patch on `grid`."""
    axes.imshow(scene.view, extent=_extent(scene), interpolation="nearest")
    if grid is not None:
        mark(axes, scene, grid)


def mark(axes: Any, scene: Scene, grid: Grid) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    (row, column), (height, width) = scene.place(grid), scene.image.shape[-2:]
    tall, wide = height / grid.height, width / grid.width
    frame = Rectangle((column * wide, row * tall), wide, tall, fill=False, edgecolor=MARK, linewidth=1.4)
    frame.set_path_effects([withStroke(linewidth=2.6, foreground="white")])  # visible on every colour
    axes.add_patch(frame)


def heat(axes: Any, scene: Scene, values: Tensor | np.ndarray, *, most: float | None = None, over: bool = True) -> Any:
    """Draw a map [rows, columns], scaled to its maximum, over the grey image or alone."""
    extent = _extent(scene)
    if over:
        axes.imshow(scene.view.mean(-1), cmap="gray", vmin=0, vmax=1, extent=extent)
    values = np.asarray(values, dtype=np.float32)
    top = float(values.max(initial=0.0)) if most is None else most
    return axes.imshow(
        values, cmap=HEAT, vmin=0, vmax=top or 1.0, extent=extent, interpolation="nearest", alpha=0.72 if over else 1.0
    )


def most(axes: Any, values: Tensor) -> None:
    """Write the largest value below a map."""
    axes.set_xlabel(f"up to {float(values.max()):.1%}", fontsize=7)


def _extent(scene: Scene) -> tuple[float, float, float, float]:
    height, width = scene.image.shape[-2:]
    return 0, width, height, 0
