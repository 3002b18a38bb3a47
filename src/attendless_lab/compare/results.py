"""Runs and costs → rows, and the rows as JSON, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attendless.measure.clock import enough
from attendless.stamp import stamp as stamp_now
from attendless.stamp import stamp_line
from attendless.storage import atomic

from .cost import measured
from .run import finished
from .variants import Variant

Row = dict[str, Any]
#: Latencies are comparable if the stamps agree in these fields.
_MACHINE = ("cpu", "torch_capability", "threads", "device", "torch", "native_kernels")


def gather(out: Path, variants: Sequence[Variant], failed: Mapping[str, str]) -> tuple[list[Row], dict[str, Any]]:
    """One row per variant from the files of its folder, and the stamp of the measurements."""
    costs = {variant: measured(out / variant.folder) for variant in variants}
    stamps = [found["stamp"] for found in costs.values() if found]
    stamp = stamps[-1] if stamps else stamp_now()
    rows = []
    for variant, found in costs.items():
        row = _row(out, variant, found or {"row": {}, "curve": [], "stamp": stamp})
        reasons = [reason for folder, reason in failed.items() if Path(folder).parent == out / variant.folder]
        elsewhere = any((found or {"stamp": stamp})["stamp"].get(key) != stamp.get(key) for key in _MACHINE)
        row["failed"] = "; ".join(dict.fromkeys(reasons)) or None
        if found and elsewhere:
            row["notes"] = [*row["notes"], f"measured elsewhere: {stamp_line(found['stamp'])}"]
        rows.append(row)
    for setting in {row["setting"] for row in rows}:
        group = [row for row in rows if row["setting"] == setting]
        on_one_clock([row for row in group if "speedup" in row])
        for place in range(max(len(row["curve"]) for row in group)):
            on_one_clock([row["curve"][place] for row in group if place < len(row["curve"])])
    return rows, stamp


def _row(out: Path, variant: Variant, found: Mapping[str, Any]) -> Row:
    setting = variant.setting
    folders = sorted((out / variant.folder).glob("seed-*"), key=lambda path: int(path.name[5:]))
    runs = [result | {"folder": str(f.relative_to(out))} for f in folders if (result := finished(f)) is not None]
    top1 = [run["top1"] for run in runs]
    asked = {"model": setting.model, "attention": variant.attention, "patch": setting.patch, "data": setting.data}
    recipe = {"recipe": setting.recipe_name, "setting": setting.folder}
    accuracy = {
        "top1": mean(top1),
        "top1_mean": mean(top1),
        "top1_std": statistics.stdev(top1) if len(top1) > 1 else None,
        "top5": mean([run["top5"] for run in runs if "top5" in run]),
        "images": runs[0]["images"] if runs else None,
        "skipped": sum(run["skipped"] for run in runs),
        "seeds": [run["seed"] for run in runs],
        "runs": runs,
    }
    costs = {name: value for name, value in found["row"].items() if name not in ("seed", "notes")}
    return {
        "ms": None,
        **costs,
        **asked,
        **recipe,
        **accuracy,
        "notes": found["row"].get("notes", []),
        "curve": found["curve"],
    }


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def on_one_clock(points: Sequence[Row]) -> None:
    """Give variants of one setting, at one size, comparable latencies: `ms`, relative to the median baseline.

    Variants measured on different days may have run on different machines. Their speed-ups over the baseline, which was
    in the same interleaved benchmark as each of them, are comparable.
    """
    dense = statistics.median(point["dense_latency_ms"] for point in points) if points else 0.0
    for point in points:
        point["ms"] = dense / point["speedup"]


def largest(row: Row) -> Row:
    """The cost of a row at the largest size measured, where attentions differ most; empty if nothing was measured."""
    return row["curve"][-1] if row["curve"] else {}


def headline(rows: Sequence[Row]) -> str:
    """The main finding: the most accurate attention, and its cost at the largest size measured."""
    first = rows[0]["setting"] if rows else ""
    known = [row for row in rows if row["setting"] == first and row["top1_mean"] is not None]
    if len(known) < 2:
        return ""
    best, worst = (choose(known, key=lambda row: row["top1_mean"]) for choose in (max, min))
    text = (
        f"trained under identical conditions, {best['attention']} has the highest top-1, {best['top1_mean']:.1f} %, "
        f"and {worst['attention']} the lowest, {worst['top1_mean']:.1f} %"
    )
    timed = [(row, largest(row)) for row in known if largest(row)]
    if len(timed) < 2:
        return text
    quickest, point = max(timed, key=lambda pair: pair[1]["speedup"])
    where = f"at {point['tokens']:,} tokens" if point.get("tokens") else f"at {point['size'][0]} px"
    return (
        f"{text}; {where} {quickest['attention']} is the fastest, {point['speedup']:.1f}× as fast as the baseline, "
        f"with {quickest['top1_mean']:.1f} %"
    )


# The table in every format -------------------------------------------------------------------------------------------


def _accuracy(row: Row) -> str:
    if row["top1_mean"] is None:
        return "failed" if row.get("failed") else "–"
    return f"{row['top1_mean']:.2f}" + (f" ± {row['top1_std']:.2f}" if row["top1_std"] is not None else "")


def _difference(point: Row) -> str:
    """The speed-up as text, or that the difference is not statistically significant."""
    if not point["distinguishable"]:
        return "not distinguishable" if enough(point["pairs"]) else "too few rounds"
    return "faster" if point["speedup"] > 1 else "slower"


def _cost(form: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: form(largest(row)) if largest(row) else "–"


#: Column of the printed table → how its cell is formatted.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "attention": lambda row: row["attention"],
    "top-1 %": _accuracy,
    "params": lambda row: f"{row['params'] / 1e6:.3f} M" if row.get("params") else "–",
    "tokens": _cost(lambda at: f"{at['tokens']:,}" if at.get("tokens") else "–"),
    "MACs": _cost(lambda at: f"{at['macs']['total'] / 1e6:,.0f} M"),
    "core": _cost(lambda at: f"{at['macs']['core'] / 1e6:,.0f} M"),
    "ms": _cost(lambda at: f"{at['ms']:.2f}"),
    "speed-up": _cost(lambda at: f"{at['speedup']:.2f}×"),
    "quartiles": _cost(lambda at: "{:.2f}–{:.2f}".format(*at["quartiles"])),
    "against baseline": _cost(_difference),
    "MB": _cost(lambda at: f"{at['peak_memory_mb']:.1f}" if at["peak_memory_mb"] is not None else "–"),
}


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells; settings get columns only where several differ."""
    differing = [name for name in ("model", "patch", "data", "recipe") if len({str(row[name]) for row in rows}) > 1]
    names = [*differing, *COLUMNS]
    cells = [[*(str(row[n]) for n in differing), *(form(row) for form in COLUMNS.values())] for row in rows]
    return names, cells


def failures(rows: Sequence[Row]) -> list[str]:
    """The reasons of failed runs, one line per variant."""
    return [f"{row['attention']} failed: {row['failed']}" for row in rows if row.get("failed")]


def markdown(rows: Sequence[Row]) -> str:
    """The table, followed by the failures."""
    names, cells = table(rows)
    lines = [names, ["---" if i == 0 else "---:" for i in range(len(names))], *cells]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    return text + "".join(f"\n{failure}\n" for failure in failures(rows))


def latex(rows: Sequence[Row]) -> str:
    """A booktabs table."""
    names, cells = table(rows)

    def line(items: Sequence[str]) -> str:
        return " & ".join(map(_escape, items)) + r" \\"

    head = [rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}", r"\toprule", line(names), r"\midrule"]
    return "\n".join([*head, *map(line, cells), r"\bottomrule", r"\end{tabular}"]) + "\n"


def _escape(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, f"\\{character}")
    return text.replace("±", r"$\pm$").replace("×", r"$\times$").replace("–", "--")


def as_csv(rows: Sequence[Row]) -> str:
    """Plain numbers, one column each."""
    plain = ("model", "patch", "data", "recipe", "attention", "tokens", "params", "top1_mean", "top1_std", "top5")
    costs = (
        "ms",
        "latency_ms",
        "dense_latency_ms",
        "speedup",
        "spread",
        "pairs",
        "distinguishable",
        "peak_memory_mb",
        "throughput",
        "best_batch",
    )
    parts = ("core", "projections", "mlp", "other", "total")
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n")
    write.writerow([*plain, *(f"macs_{part}" for part in parts), *costs, "seeds", "failed"])
    for row in rows:
        macs = [row.get("macs", {}).get(part) for part in parts]
        write.writerow(
            [
                *(row.get(n) for n in plain),
                *macs,
                *(row.get(n) for n in costs),
                "/".join(map(str, row["seeds"])),
                row.get("failed"),
            ]
        )
    return text.getvalue()


def write(out: Path, rows: Sequence[Row], stamp: Mapping[str, Any], commands: Sequence[str]) -> None:
    """Write `results.json`, `.csv`, `.md` and `.tex`, each atomically."""
    payload = {"stamp": stamp, "commands": list(commands), "rows": list(rows)}
    note = "\n".join([*commands, stamp_line(stamp)])
    comments = [*failures(rows), *note.splitlines()]
    texts = {
        "json": json.dumps(payload, indent=1, allow_nan=False) + "\n",
        "csv": as_csv(rows),
        "md": f"{markdown(rows)}\n```\n{note}\n```\n",
        "tex": latex(rows) + "".join(f"% {line}\n" for line in comments),
    }
    for suffix, text in texts.items():
        with atomic(out / f"results.{suffix}") as temporary:
            temporary.write_text(text, encoding="utf-8")
