"""Drawings of patterns: who sees whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..attention import Grid
from ..errors import UserError
from ..sparse.patterns import Pattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_pattern(pattern: Pattern, grid: Grid, *, query: tuple[int, int] | None = None, head: int = 0) -> Figure:
    """A figure of one head's pattern: all pairs, and on the grid what the patch at `query` (row, column) sees.

    Without a `query`, the patch in the middle is shown.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing patterns needs matplotlib: pip install 'attendless[show]'") from None
    row, column = query or (grid.height // 2, grid.width // 2)
    if not (0 <= row < grid.height and 0 <= column < grid.width):
        raise UserError(
            f"query {row},{column} is not on the grid: expected row,column below {grid.height},{grid.width}"
        )
    mask = pattern.mask()
    if mask.shape[1] != grid.tokens:
        raise UserError(f"the pattern is of {mask.shape[1]} tokens, but the grid {grid} has {grid.tokens}")
    seen = mask[head % len(mask)].numpy()
    patch = grid.prefix + row * grid.width + column
    colours = ListedColormap(["#f2f0ec", "#2b6c8f"])

    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    pairs, place = figure.subplots(1, 2)
    pairs.imshow(seen, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    pairs.set(title=f"{seen.mean():.1%} of all pairs", xlabel="key", ylabel="query")
    place.imshow(seen[patch, grid.prefix :].reshape(grid.height, grid.width), cmap=colours, vmin=0, vmax=1)
    place.plot(column, row, marker="s", color="#d1495b", markersize=5)
    prefix = f" and {grid.prefix} prefix" if grid.prefix else ""
    place.set(title=f"seen by patch {row},{column}: {int(seen[patch].sum()) - grid.prefix} patches{prefix}")
    return figure
