"""Cost against token count: milliseconds and memory, both axes logarithmic, so that a power law is a straight line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..ownership import picture_mark
from ..stamp import stamp_line
from ..storage import atomic
from .measurement import Measurement

Point = tuple[float, float]


def slope(points: Sequence[Point]) -> float | None:
    """The exponent p of the power law cost ∝ tokensᵖ that fits best; None unless two token counts differ."""
    if len({x for x, _ in points}) < 2:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


def curves(rows: Sequence[Measurement]) -> dict[str, dict[str, list[Point]]]:
    """The points of each panel: of the baseline and of every attention, by rising token count."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for panel, cost, baseline in _PANELS:
        lines: dict[str, dict[float, float]] = {}
        for row in rows:
            for name, value in (("baseline (timm)", baseline(row)), (row.label, cost(row))):
                if row.setup.tokens is not None and value is not None:
                    lines.setdefault(name, {})[row.setup.tokens] = value
        panels[panel] = {name: sorted(points.items()) for name, points in lines.items()}
    return panels


def slopes(rows: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """The fitted exponent of every curve that has one, by panel and name."""
    found: dict[str, dict[str, float]] = {}
    for panel, lines in curves(rows).items():
        exponents = {name: slope(points) for name, points in lines.items()}
        found[panel] = {name: exponent for name, exponent in exponents.items() if exponent is not None}
    return found


def plot(rows: Sequence[Measurement], path: str | Path) -> None:
    """Draw `rows` into a file whose ending names its format: .png, .svg or .pdf."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'attendless[show]'") from None
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"plot file {str(path)!r}: expected a name ending in .png, .svg or .pdf")
    panels = {panel: lines for panel, lines in curves(rows).items() if lines}
    if not panels:
        raise UserError("there is nothing to plot: no row has a token count")
    figure = Figure(figsize=(5.5 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            exponent = slope(points)
            label = name if exponent is None else f"{name}  (slope {exponent:.2f})"
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=panel)
        axis.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.grid(which="both", alpha=0.2)
        axis.legend(fontsize=8)
    figure.suptitle(f"{rows[0].setup.model}, batch {rows[0].setup.batch}", fontsize=11)
    figure.supxlabel(stamp_line(rows[0].stamp), fontsize=6)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:].lower(), metadata=picture_mark(path.suffix))


_Cost = Callable[[Measurement], float | None]
_PANELS: tuple[tuple[str, _Cost, _Cost], ...] = (
    ("ms", lambda row: row.latency_ms, lambda row: row.baseline.latency_ms),
    ("MB at the peak", lambda row: row.performance.peak_memory_mb, lambda row: row.baseline.peak_memory_mb),
)
