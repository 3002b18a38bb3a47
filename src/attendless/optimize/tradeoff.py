"""The plot of `tune`: speed-up against expected accuracy drop, with the uncertainty of both."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..palette import COLOURS
from ..show.figures import new_figure, save_figure
from ..show.labels import beside
from ..sizes import Size, size_text
from .goals import points_text
from .report import Tuned
from .results import Candidate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Placeholder colour that `svg` replaces with the text colour of the page.
_INK = "#010203"
#: Colours of the palette that are legible on light and on dark backgrounds.
_COLOURS = COLOURS[1:6]


def draw(found: Sequence[Tuned], path: str | Path) -> None:
    """Write the plot, one point per candidate; the file extension names the format."""
    save_figure(figure(found), path)


def svg(found: Sequence[Tuned]) -> str:
    """The plot as an SVG element with the colours of the page."""
    file = io.StringIO()
    figure(found, ink=_INK).savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue().replace(_INK, "currentColor")
    return text[text.index("<svg") :].replace(
        "<svg ", '<svg role="img" aria-label="speed-up against accuracy drop" ', 1
    )


def figure(found: Sequence[Tuned], ink: str = "black") -> Figure:
    """The plot; the upper right is best. Each size has its colour; numbers are rows of the table, on the front only."""
    drawn = new_figure(8, 5)
    axes: Any = drawn.subplots()
    colours = {tuned.chosen.setting.size: _COLOURS[i % len(_COLOURS)] for i, tuned in enumerate(found)}
    for tuned in found:
        colour = colours[tuned.chosen.setting.size]
        front = sorted(tuned.front, key=lambda c: c.speedup)
        axes.plot(*_places(front), "-", color=colour, alpha=0.6, label=f"{size_text(tuned.chosen.setting.size)} px")
        for c in tuned.candidates:
            _point(axes, c, colour, filled=c in front)
        axes.plot(*_places([tuned.chosen]), "D", color=colour, markersize=11, markeredgecolor=ink, zorder=3)
    axes.plot([], [], "D", color="none", markeredgecolor=ink, markersize=9, label="chosen")
    axes.plot([], [], "o", color="none", markeredgecolor=ink, markersize=5, label="not on the front")
    bound = found[0].goal.max_drop
    if bound is not None:
        axes.axhline(bound, color=ink, linestyle=":", linewidth=1, label=f"{points_text(bound)}, the bound")
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.12)
    batch = found[0].chosen.setting.batch
    axes.set_xlabel(f"speed-up over the baseline, batch {batch} (bars: quartiles)", color=ink)
    axes.set_ylabel("expected accuracy drop, percentage points (bars: 95 %)", color=ink)
    axes.tick_params(colors=ink)
    axes.spines[:].set_color(ink)
    axes.grid(alpha=0.25)
    drawn.legend(loc="outside upper center", ncols=len(found) + 3, fontsize=8, labelcolor=ink, frameon=False)
    _number(drawn, axes, found, colours)
    return drawn


def _places(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [c.speedup for c in candidates], [c.expected_drop for c in candidates]


def _point(axes: Any, c: Candidate, colour: str, filled: bool) -> None:
    (left, right), (low, high) = c.timed.comparison.quartiles, c.judged.expected_drop_ci
    x, y = c.speedup, c.expected_drop
    axes.errorbar(
        x,
        y,
        xerr=[[max(0.0, x - left)], [max(0.0, right - x)]],
        yerr=[[max(0.0, y - low)], [max(0.0, high - y)]],
        fmt="o",
        markersize=5,
        color=colour,
        markerfacecolor=colour if filled else "none",
        ecolor=(colour, 0.5),
        elinewidth=1,
    )


def _number(drawn: Figure, axes: Any, found: Sequence[Tuned], colours: Mapping[Size, str]) -> None:
    """Put the table's numbers beside the points of the front where there is room, those of chosen candidates first."""
    rows = [(c, tuned) for tuned in found for c in tuned.candidates]
    front = [i for i, (c, tuned) in enumerate(rows) if c in tuned.front and c.changed]
    front.sort(key=lambda i: rows[i][0] != rows[i][1].chosen)
    drawn.draw_without_rendering()  # fixes the position of the axes
    paper, unit = axes.get_window_extent(), 72 / drawn.dpi
    corners = [axes.transData.transform((c.speedup, c.expected_drop)) - paper.p0 for c, _ in rows]
    points = [(float(x) * unit, float(y) * unit) for x, y in corners]
    for i, offset in beside(points, front, (paper.width * unit, paper.height * unit)).items():
        c = rows[i][0]
        axes.annotate(
            str(i + 1), (c.speedup, c.expected_drop), offset, textcoords="offset points", ha="center", va="center",
            fontsize=9, color=colours[c.setting.size],
        )  # fmt: skip
