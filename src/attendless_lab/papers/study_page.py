"""The page and the figure of a study, written from its results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attendless.show.figures import new_figure, save_figure
from attendless.stamp import stamp_line

from .page import markdown_table
from .study import NOT_SIGNIFICANT, Summary, summarise

_BBVIT = """\
# BBViT at small scale

After this page you know whether sparse attention beats full attention in small ViTs on little data, and how to repeat
the runs.

```
attendless papers bbvit-1                  # parameters, and the reason for the difference
attendless papers bbvit-2 --time           # the eight models, their costs, hours of a full training
attendless papers bbvit-2 --scale small --data IMAGENETTE --out runs/bbvit
attendless train bbvit_tiny --recipe bbvit --data IMAGENETTE --out runs/tiny      # full scale: requires a GPU
```

BBViT reports 64.58 top-1 on Imagenette for BigBird's patterns and 53.33 for full attention, with three layers of width
512. In the released code the two models differ in more than the attention:

- BBViT has no output projection, which explains the whole difference in parameters.
- R, W and G select blocks of queries, not patterns of keys.
- BBViT has no dropout in its attention; its ViT drops attention weights and outputs at a rate of 0.1.

`bbvit_tiny`, `bbvit_moderate`, `bbvit_vit_tiny` and `bbvit_vit_moderate` follow that code with one exception. The code
draws new random blocks in every forward pass, also in evaluation; attendless draws them once per layer and head.

In the runs below, only the attention differs. Output projection, pooling, recipe, images, their order and all initial
weights shared with full attention are equal. The [tables of the paper](papers/bbvit.md) are counted at full scale.
"""
_FAIR = """\
# The fair comparison at small scale

After this page you know how eight attentions compare in one model at small scale, with measured latency, and how to
repeat the runs.

```
attendless papers fair-comparison          # parameters and FLOPs at full scale, beside the poster's
attendless papers fair-comparison-complexity
attendless papers fair-comparison --scale small --data IMAGENETTE --out runs/fair
attendless train pyramid_fair_patch4_224 --attention xca:plain,lpi --recipe fair --data IMAGENET --out runs/xca
```

The poster asks whether cheaper attentions pay for smaller patches. It uses one hierarchical model and one recipe, and
changes only patch size and attention. On ImageNet, all attentions are below full attention; local patch interaction
(LPI) and windows come close. The isotropic model is not worse than the hierarchical one. The poster reports no latency.
The [table of the poster](papers/fair-comparison.md) is counted at full scale.
"""
INTRODUCTIONS = {"bbvit": _BBVIT, "fair-comparison": _FAIR}


def page(results: Mapping[str, Any]) -> str:
    """The page of the results of `study.gather`, in Markdown."""
    rows = results["rows"]
    done, planned = _progress(results)
    name, made = results["study"], results["pictures"]
    command = f"attendless papers {results['table']} --scale small --data IMAGENETTE --out runs/{name}"
    lines = [
        INTRODUCTIONS[name],
        "## Training",
        f"{made['train']:,} training images and {made['val']:,} validation images of Imagenette, resized to "
        f"{results['side']} px. Recipe `{results['recipe']}`. Accuracy is top-1 on the validation images after the "
        "last epoch, in per cent. The runs are short: they compare early training, not the result of hundreds of "
        "epochs.",
        "",
        f"**{done} of {planned} runs are done.** "
        + ("This command repeats them:" if done == planned else "This command runs the rest:"),
        "",
        f"```\n{command}\n```",
        "",
        "Each difference is to the row in the column *baseline*, paired by seed, with its 95 % interval (Student's t). "
        "*Better* and *worse* mean that the interval excludes zero. Without any true difference, one row in twenty "
        "would still show one. A single run has no interval.",
        "",
    ]
    if done:
        lines += ["## Summary", *(_in_short(part, rows) for part in _parts(rows)), ""]
        lines += [f"![Top-1 of every row](results/{name}.png)", ""]
    for part in _parts(rows):
        mine = [row for row in rows if row["part"] == part]
        lines += [f"## {part}", rows_table(mine), "", _verdict(mine), ""]
    lines.append(f"Written from `docs/results/{name}.json`. {stamp_line(results['stamp'])}")
    return "\n".join(lines) + "\n"


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["part"] for row in rows))


def _in_short(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The significant rows of a part, and the range of the differences."""
    mine = [row for row in rows if row["part"] == part]
    found = {row["row"]: summarise(row, mine) for row in mine if row["against"]}
    known = {name: one for name, one in found.items() if one.difference is not None}
    if not known:
        return f"- **{part}**: no results yet."
    parts = []
    for verdict in ("better", "worse"):
        names = [f"{name} {_difference(one)}" for name, one in known.items() if one.verdict == verdict]
        parts += [f"{verdict}: {'; '.join(names)}"] if names else []
    low, high = (
        f"{extreme(one.difference or 0 for one in known.values()):+.1f}".replace("-", "−") for extreme in (min, max)
    )
    text = ". ".join(parts) if parts else "no significant difference"
    return f"- **{part}**: {text}. Differences from {low} to {high} percentage points."


def _progress(results: Mapping[str, Any]) -> tuple[int, int]:
    """Runs done and planned; a model that occurs in several parts is trained once."""
    rows = {tuple(row[key] for key in ("model", "attention", "patch", "changes")): row for row in results["rows"]}
    return sum(len(row["runs"]) for row in rows.values()), len(rows) * len(results["seeds"])


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of one part, with the difference of each to its baseline."""
    timed = any("latency_ms" in row for row in rows)
    columns = ["row", "attention", "parameters", "top-1", "baseline", "difference", "verdict"]
    columns += ["latency, ms", "MACs"] if timed else []
    cells = []
    for row in rows:
        found = summarise(row, rows)
        change = f" · `{row['changes']}`" if row["changes"] else ""
        line = [row["row"], f"`{row['attention']}`{change}", f"{row['params'] / 1e6:.2f} M"]
        line += [_mean(found), row["against"] or "–", _difference(found), found.verdict if row["against"] else "–"]
        if timed:
            ms, macs = row.get("latency_ms"), row.get("macs")
            line += ["–" if ms is None else f"{ms:.2f}", "–" if macs is None else f"{macs['total'] / 1e6:.1f} M"]
        cells.append(line)
    return markdown_table(columns, cells)


def _mean(found: Summary) -> str:
    if found.mean is None:
        return "not run yet"
    return f"{found.mean:.1f}" + (f" ± {found.deviation:.1f}" if found.deviation is not None else "")


def _difference(found: Summary) -> str:
    if found.difference is None:
        return "–"
    text = f"{found.difference:+.1f}".replace("-", "−")
    if found.reach is None:
        return f"{text} (one run)"
    low, high = (f"{found.difference + sign * found.reach:+.1f}".replace("-", "−") for sign in (-1, 1))
    return f"{text} ({low} to {high})"


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The number of rows with each verdict, and of runs per row."""
    found = [summarise(row, rows) for row in rows if row["against"]]
    counts = {name: sum(one.verdict == name for one in found) for name in ("better", "worse", NOT_SIGNIFICANT)}
    waiting = len(found) - sum(counts.values())
    runs = sorted({summarise(row, rows).runs for row in rows})
    text = f"Of {len(found)} compared rows: {', '.join(f'{count} {name}' for name, count in counts.items())}"
    text += f"; {waiting} require a second run" if waiting else ""
    return f"{text}. Runs per row: {' to '.join(map(str, dict.fromkeys((runs[0], runs[-1]))))}."


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Draw the top-1 of every row: its runs as dots, their mean as a line."""
    rows = results["rows"]
    figure = new_figure(7, 0.9 + 0.24 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        values = [run["top1"] for run in row["runs"]]
        axes.plot(values, [place] * len(values), "o", color="tab:blue", markersize=4, alpha=0.7)
        if values:
            mean = sum(values) / len(values)
            axes.plot([mean, mean], [place - 0.35, place + 0.35], color="black", linewidth=1.5)
    first = {part: i for i, part in reversed(list(enumerate(row["part"] for row in rows)))}
    for place in first.values():
        axes.axhline(place - 0.5, color="lightgrey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("top-1, %")
    done, planned = _progress(results)
    axes.set_title(f"{results['study']}: {done} of {planned} runs", fontsize=9)
    save_figure(figure, path)
