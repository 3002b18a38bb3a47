"""Matplotlib figures without a display and without global state, with an install hint if Matplotlib is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..ownership import picture_mark
from ..storage import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float = 7, height: float = 4.5) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'attendless[show]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write the figure atomically; the ending of the path sets the format."""
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise UserError(f"figure {str(path)!r}: expected a name ending in {', '.join(_FORMATS)}")
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:].lower(), metadata=picture_mark(path.suffix))
