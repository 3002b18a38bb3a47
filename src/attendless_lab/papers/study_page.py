"""A study's page and figure, made from its results alone: what was asked, what has run, what it says so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attendless.show.figures import new_figure, save_figure
from attendless.stamp import stamp_line

from .page import markdown_table
from .study import Summary, summarise

_BBVIT = """\
# Does sparse attention beat full attention in small ViTs on little data?

```
attendless papers bbvit-1                  # the parameters, and where the gap comes from
attendless papers bbvit-2 --time           # the eight models, their costs, hours of a full training
attendless papers bbvit-2 --scale small --data IMAGENETTE --out runs/bbvit
attendless train bbvit_tiny --recipe bbvit --data IMAGENETTE --out runs/tiny      # at full scale: for a GPU
```

BBViT says so: BigBird's patterns 64.58 top-1 on Imagenette, full attention 53.33, three layers of width 512. In its
released code the two models differ in more than the attention. BBViT has no output projection, which is the whole
difference in parameters, and its R, W and G switch blocks of queries rather than patterns of keys. Its attention has no
dropout; its ViT drops attention weights and outputs at 0.1. `bbvit_tiny`,
`bbvit_moderate`, `bbvit_vit_tiny` and `bbvit_vit_moderate` are the models as that code has them. One thing is not taken
over: it draws new random blocks in every forward pass, also when it is judged; here they are drawn once for each layer
and head.

Below, everything but the attention is the same: output projection, pool, recipe, pictures and their order, and every
initial weight that full attention has too. Images here are 160 px; a paper's 184 or 368 px are made from them by
enlarging.
"""
_FAIR = """\
# Attentions in one model, compared fairly

```
attendless papers fair-comparison          # parameters and FLOPs at full scale, beside the poster's
attendless papers fair-comparison-complexity
attendless papers fair-comparison --scale small --data IMAGENETTE --out runs/fair
attendless train pyramid_fair_patch4_224 --attention xca:plain,lpi --recipe fair --data IMAGENET --out runs/xca
```

The poster asks whether cheaper attentions are worth it for smaller patches: one pyramid, one recipe, only patch and
attention change. On ImageNet it found all of them below full attention, local patch interaction and windows nearly
level, and a column no worse than a pyramid. Below, the same question at a scale that a CPU can answer, with
milliseconds measured, which the poster does not have.
"""
INTRODUCTIONS = {"bbvit": _BBVIT, "fair-comparison": _FAIR}


def page(results: Mapping[str, Any]) -> str:
    """The whole page in Markdown."""
    rows = results["rows"]
    done, planned = _progress(results)
    name, made = results["study"], results["pictures"]
    command = f"attendless papers {results['table']} --scale small --data IMAGENETTE --out runs/{name}"
    lines = [
        INTRODUCTIONS[name],
        "## What was trained",
        f"{made['train']:,} pictures to learn from, made {results['side']} px small, {made['val']:,} to be judged on. "
        f"Recipe `{results['recipe']}`. Accuracy is top-1 on all of the latter after the last epoch, in per cent. "
        "Runs are short: they say what learns better in so little time, not what ends higher after hundreds of epochs.",
        "",
        f"**{done} of {planned} runs are done.** "
        + ("This does them again:" if done == planned else "This goes on with the rest, the most telling first:"),
        "",
        f"```\n{command}\n```",
        "",
        "Differences are to the row named in the same part, paired by seed, with their 95 % interval (Student's t); a "
        "row says *better* or *worse* only if that leaves out zero. One row in twenty does so by chance. A single "
        "run has no interval.",
        "",
    ]
    if done:
        lines += ["## In short", *(_in_short(part, rows) for part in _parts(rows)), ""]
        lines += [f"![top-1 of every row](results/{name}.png)", ""]
    for part in _parts(rows):
        mine = [row for row in rows if row["part"] == part]
        lines += [f"## {part}", rows_table(mine), "", _verdict(mine), ""]
    lines.append(f"Made from `docs/results/{name}.json`. {stamp_line(results['stamp'])}")
    return "\n".join(lines) + "\n"


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["part"] for row in rows))


def _in_short(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """What a part says: which rows are better or worse, and how far apart all of them lie."""
    mine = [row for row in rows if row["part"] == part]
    found = {row["row"]: summarise(row, mine) for row in mine if row["against"]}
    known = {name: one for name, one in found.items() if one.difference is not None}
    if not known:
        return f"- **{part}**: nothing yet."
    told = []
    for verdict in ("better", "worse"):
        names = [f"{name} {_difference(one)}" for name, one in known.items() if one.verdict == verdict]
        told += [f"{verdict}: {'; '.join(names)}"] if names else []
    low, high = (
        f"{extreme(one.difference or 0 for one in known.values()):+.1f}".replace("-", "−") for extreme in (min, max)
    )
    found_text = ". ".join(told) if told else "no row can be told from what it is compared with"
    return f"- **{part}**: {found_text}. Differences from {low} to {high} points."


def _progress(results: Mapping[str, Any]) -> tuple[int, int]:
    """Runs done and planned; a model that stands in several parts is trained once."""
    rows = {tuple(row[key] for key in ("model", "attention", "patch", "changes")): row for row in results["rows"]}
    return sum(len(row["runs"]) for row in rows.values()), len(rows) * len(results["seeds"])


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One part's rows, each beside the row it is compared with."""
    timed = any("latency_ms" in row for row in rows)
    columns = ["row", "attention", "parameters", "runs", "top-1", "against", "difference", "verdict"]
    columns += ["ms", "MACs"] if timed else []
    cells = []
    for row in rows:
        found = summarise(row, rows)
        change = f" · `{row['changes']}`" if row["changes"] else ""
        line = [row["row"], f"`{row['attention']}`{change}", f"{row['params'] / 1e6:.2f} M", str(found.runs)]
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
    """One sentence of what the part says so far."""
    found = [summarise(row, rows) for row in rows if row["against"]]
    told = {name: sum(one.verdict == name for one in found) for name in ("better", "worse", "not told apart")}
    waiting = len(found) - sum(told.values())
    text = ", ".join(f"{count} {name}" for name, count in told.items())
    text = f"Of {len(found)} rows that are compared: {text}"
    return f"{text}; {waiting} wait for a second run." if waiting else f"{text}."


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Every row's top-1: its runs as dots, their mean as a line."""
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
