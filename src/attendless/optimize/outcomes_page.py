"""The report of `optimize` as one self-contained HTML page: the choice, a waterfall, the scatter and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ..export.description import Description
from ..palette import COLOURS
from ..show.html import fill, style, table_html, template
from ..stamp import stamp_line
from .examples_page import examples_html
from .outcomes import Findings, Outcome, Step

#: A value → its place on the page.
Place = Callable[[float], float]
#: Width, height and margins (left, right, top, bottom) of the scatter.
_SIZE, _MARGINS = (760, 380), (56, 24, 26, 44)


def page(found: Findings, about: Description, title: str, run: str, command: str = "") -> str:
    """The page. `run` are the lines of Python that run the file, `command` reproduces it."""
    heads, *rows = found.table()
    parts = {
        "style": style(),
        "title": escape(title),
        "findings": "".join(_finding(line) for line in found.findings),
        "run": escape(run),
        "waterfall": waterfall(found.steps),
        "figure": scatter(found),
        "examples": examples_html(found.examples, about),
        "table": table_html(heads, rows, text=("attention", "reducer")),
        "notes": "".join(f'<p class="note">{escape(line)}</p>' for line in found.how_to_read),
        "command": f"<code>{escape(command)}</code>" if command else "",
        "stamp": escape(stamp_line(found.stamp)),
    }
    return fill(template("optimized.html"), parts)


def _finding(line: str) -> str:
    kind = ' class="note"' if line.startswith("note: ") else ""
    return f"<p{kind}>{escape(line)}</p>"


def waterfall(steps: Sequence[Step]) -> str:
    """A bar for each step: from the speed-up before it to the speed-up after it, with its factor and its drop."""
    row, left, width = 34, 190, 400
    scale = width / max(step.speedup for step in steps)
    lines, before = [], Step("", 0.0, 0.0)
    for i, step in enumerate(steps):
        low, high = sorted((before.speedup, step.speedup))
        y = i * row
        factor = f" (× {step.speedup / before.speedup:.2f}, {step.drop - before.drop:+.2f} points)" if i else ""
        lines.append(
            f'<text class="name" x="{left - 8}" y="{y + 20}" text-anchor="end">{escape(step.name)}</text>'
            f'<rect x="{left + low * scale:.1f}" y="{y + 6}" width="{max(1.0, (high - low) * scale):.1f}" height="20" '
            f'fill="{COLOURS[1 + i % 5]}"/>'
            f'<text x="{left + high * scale + 6:.1f}" y="{y + 20}">{step.speedup:.2f}×{escape(factor)}</text>'
        )
        before = step
    label = "; ".join(f"{step.name}: {step.speedup:.2f} times" for step in steps)
    return _svg(left + width + 210, len(steps) * row + 6, label, lines)


def scatter(found: Findings) -> str:
    """Speed-up against drop, one point for each variant; the drop grows downwards."""
    points = found.outcomes
    runtimes = list(dict.fromkeys(c.target.runtime for c in points))
    colours = {name: COLOURS[1 + i % 5] for i, name in enumerate(runtimes)}
    high = max(c.timed.comparison.quartiles[1] for c in points) * 1.05
    bounds = [found.goal.max_drop] if found.goal.max_drop is not None else []
    ends = [0.0, *(c.expected_drop for c in points), *(1.2 * bound for bound in bounds)]
    top, bottom = min(ends), max(max(ends), 0.1) * 1.08
    (width, height), (left, right, above, below) = _SIZE, _MARGINS

    def x(speedup: float) -> float:
        return left + (width - left - right) * speedup / high

    def y(drop: float) -> float:
        share = (min(max(drop, top), bottom) - top) / (bottom - top)
        return above + (height - above - below) * share

    lines = _axes(x, y, high, top, bottom)
    lines += [
        f'<line x1="{left}" x2="{width - right}" y1="{y(b):.1f}" y2="{y(b):.1f}" stroke="currentColor" '
        f'stroke-dasharray="2 4"/>'
        for b in bounds
    ]
    front = sorted(found.front, key=lambda c: c.speedup)
    path = " ".join(f"{x(c.speedup):.1f},{y(c.expected_drop):.1f}" for c in front)
    lines.append(f'<polyline points="{path}" fill="none" stroke="currentColor" opacity="0.4"/>')
    numbers = {id(c): i for i, c in enumerate(sorted(points, key=lambda c: c.speedup), 1)}
    for c in points:
        lines.append(_mark(c, x, y, colours[c.target.runtime], numbers[id(c)], c == found.chosen))
    keys = "".join(
        f'<span><svg viewBox="0 0 16 16"><circle cx="8" cy="8" r="5" fill="{colour}"/></svg>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return _svg(width, height, "speed-up against accuracy drop", lines) + f'<div class="legend">{keys}</div>'


def _mark(c: Outcome, x: Place, y: Place, colour: str, number: int, chosen: bool) -> str:
    across, down = x(c.speedup), y(c.expected_drop)
    (left, right), (low, high) = c.timed.comparison.quartiles, c.judged.expected_drop_ci
    bars = _line(x(left), down, x(right), down, colour) + _line(across, y(low), across, y(high), colour)
    ring = f'<circle cx="{across:.1f}" cy="{down:.1f}" r="9" fill="none" stroke="currentColor"/>' if chosen else ""
    title = f"<title>{escape(str(c.variant))}: {c.speedup:.2f}×, {c.expected_drop:.2f} points</title>"
    return (
        f'<g class="mark">{title}{bars}{ring}<circle cx="{across:.1f}" cy="{down:.1f}" r="5" fill="{colour}"/>'
        f'<text x="{across + 8:.1f}" y="{down - 7:.1f}">{number}</text></g>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" opacity="0.5"/>'


def _axes(x: Place, y: Place, high: float, top: float, bottom: float) -> list[str]:
    (width, height), (left, right, above, below) = _SIZE, _MARGINS
    base = height - below
    lines = [
        f'<line class="axis" x1="{left}" x2="{width - right}" y1="{base}" y2="{base}"/>',
        f'<line class="axis" x1="{left}" x2="{left}" y1="{above}" y2="{base}"/>',
        f'<text x="{(left + width) / 2:.0f}" y="{height - 6}" text-anchor="middle">speed-up over eager fp32</text>',
        f'<text transform="translate(14 {base / 2:.0f}) rotate(-90)" text-anchor="middle">drop, points</text>',
    ]
    lines += [
        f'<text x="{x(tick):.1f}" y="{base + 16}" text-anchor="middle">{tick:g}×</text>' for tick in _ticks(0.0, high)
    ]
    lines += [
        f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>' for tick in _ticks(top, bottom)
    ]
    return lines


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two."""
    raw = max(high - low, 1e-6) / 5
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else next(10.0**-n for n in range(1, 9) if raw >= 10.0**-n)
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = int(low / step)
    return [round(step * i, 10) for i in range(first, int(high / step) + 1) if low <= step * i <= high]


def _svg(width: float, height: float, label: str, lines: Sequence[str]) -> str:
    start = (
        f'<svg role="img" style="min-width: 36rem" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}">'
    )
    return f"{start}{''.join(lines)}</svg>"
