"""A matplotlib figure, made without a screen and without global state, with a hint if matplotlib is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float = 7, height: float = 4.5) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'attendless[show]'") from None
    return Figure(figsize=(width, height), layout="constrained")
