"""The trade-off `tune` found, drawn: milliseconds against agreement with the dense model."""

from __future__ import annotations

from pathlib import Path

from ..measure.tune import Tuned
from ..palette import COLOURS
from .figures import new_figure


def draw(tuned: Tuned, path: str | Path) -> None:
    """One point per setting of the front, the chosen one marked; the top left is best."""
    figure = new_figure()
    axes = figure.subplots()
    points = sorted(tuned.front, key=lambda setting: setting.latency_ms)
    axes.plot([s.latency_ms for s in points], [100 * s.agreement for s in points], "o-", color=COLOURS[0])
    chosen = tuned.chosen
    axes.plot(
        chosen.latency_ms, 100 * chosen.agreement, "D", color=COLOURS[1], markersize=10, label=f"chosen: {tuned.reason}"
    )
    for i, setting in enumerate(points):
        label = f"{100 * setting.core_share:.0f} % of core MACs, −{setting.expected_drop:.2f} points"
        left = i > len(points) // 2
        axes.annotate(
            label,
            (setting.latency_ms, 100 * setting.agreement),
            xytext=(-6 if left else 6, 6 if left else -10),
            ha="right" if left else "left",
            textcoords="offset points",
            fontsize=7,
        )
    axes.set(xlabel="milliseconds per image, batch 1", ylabel="images answered as by the dense model, %")
    axes.set_title(f"What {tuned.images} images allow")
    axes.grid(alpha=0.3)
    axes.margins(x=0.1, y=0.15)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
