"""Runs and costs → rows, and the rows as JSON, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..measure.clock import enough
from ..stamp import stamp as stamp_now
from ..stamp import stamp_line
from ..storage import atomic
from .contestants import Contestant
from .cost import measured
from .run import finished

Row = dict[str, Any]
#: What two stamps must agree in for their times to be comparable.
_MACHINE = ("cpu", "torch_capability", "threads", "device", "torch", "native_kernels")


def gather(out: Path, contestants: Sequence[Contestant], failed: Mapping[str, str]) -> tuple[list[Row], dict[str, Any]]:
    """A row for every contestant from what its folder holds, and the stamp of the measurements."""
    costs = {contestant: measured(out / contestant.folder) for contestant in contestants}
    stamps = [found["stamp"] for found in costs.values() if found]
    stamp = stamps[-1] if stamps else stamp_now()
    rows = []
    for contestant, found in costs.items():
        row = _row(out, contestant, found or {"row": {}, "curve": [], "stamp": stamp})
        reasons = [reason for folder, reason in failed.items() if Path(folder).parent == out / contestant.folder]
        elsewhere = any((found or {"stamp": stamp})["stamp"].get(key) != stamp.get(key) for key in _MACHINE)
        row["failed"] = "; ".join(dict.fromkeys(reasons)) or None
        if found and elsewhere:
            row["notes"] = [*row["notes"], f"measured elsewhere: {stamp_line(found['stamp'])}"]
        rows.append(row)
    for row in rows:
        row["ms"] = comparable_ms(row, rows)
    return rows, stamp


def _row(out: Path, contestant: Contestant, found: Mapping[str, Any]) -> Row:
    setting = contestant.setting
    folders = sorted((out / contestant.folder).glob("seed-*"), key=lambda path: int(path.name[5:]))
    runs = [result | {"folder": str(f.relative_to(out))} for f in folders if (result := finished(f)) is not None]
    top1 = [run["top1"] for run in runs]
    asked = {"model": setting.model, "attention": contestant.attention, "patch": setting.patch, "data": setting.data}
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
    return {**costs, **asked, **recipe, **accuracy, "notes": found["row"].get("notes", []), "curve": found["curve"]}


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def comparable_ms(row: Row, rows: Sequence[Row]) -> float | None:
    """Milliseconds on the clock of the setting's median dense model.

    Contestants that were measured on different days met different machines; the ratios to the dense model, which was
    timed by turns with each of them, belong together.
    """
    if "speedup" not in row:
        return None
    dense = [r["dense_latency_ms"] for r in rows if r["setting"] == row["setting"] and "dense_latency_ms" in r]
    return statistics.median(dense) / row["speedup"]


# The table in every format -------------------------------------------------------------------------------------------


def _accuracy(row: Row) -> str:
    if row["top1_mean"] is None:
        return "failed" if row.get("failed") else "–"
    return f"{row['top1_mean']:.2f}" + (f" ± {row['top1_std']:.2f}" if row["top1_std"] is not None else "")


def _difference(row: Row) -> str:
    """What the paired ratios allow to say."""
    if not row["distinguishable"]:
        return "not distinguishable" if enough(row["pairs"]) else "too few rounds"
    return "faster" if row["speedup"] > 1 else "slower"


def _cost(form: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: form(row) if row.get("macs") else "–"


#: The columns people read, and how each is printed.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "attention": lambda row: row["attention"],
    "top-1 %": _accuracy,
    "params": _cost(lambda row: f"{row['params'] / 1e6:.3f} M"),
    "MACs": _cost(lambda row: f"{row['macs']['total'] / 1e6:.2f} M"),
    "core": _cost(lambda row: f"{row['macs']['core'] / 1e6:.2f} M"),
    "ms": _cost(lambda row: f"{row['ms']:.2f}"),
    "speed-up": _cost(lambda row: f"{row['speedup']:.2f}×"),
    "quartiles": _cost(lambda row: "{:.2f}–{:.2f}".format(*row["quartiles"])),
    "against dense": _cost(lambda row: _difference(row)),
    "MB": _cost(lambda row: f"{row['peak_memory_mb']:.1f}" if row["peak_memory_mb"] is not None else "–"),
    "images/s": _cost(lambda row: f"{row['throughput']:.0f}" if row.get("throughput") else "–"),
}


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells; what distinguishes settings gets columns only where there are several."""
    differing = [name for name in ("model", "patch", "data", "recipe") if len({str(row[name]) for row in rows}) > 1]
    names = [*differing, *COLUMNS]
    cells = [[*(str(row[n]) for n in differing), *(form(row) for form in COLUMNS.values())] for row in rows]
    return names, cells


def failures(rows: Sequence[Row]) -> list[str]:
    """Why runs failed, one line for each contestant."""
    return [f"{row['attention']} failed: {row['failed']}" for row in rows if row.get("failed")]


def markdown(rows: Sequence[Row]) -> str:
    """The table, and below it what failed and why."""
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
    """`results.json`, `.csv`, `.md` and `.tex`, each whole or not at all."""
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
