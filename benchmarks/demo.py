"""Measure the duration of `attendless demo` and write the table of docs/results/compare.md.

python benchmarks/demo.py run DIR              # run the demo in a new folder and measure its duration
python benchmarks/demo.py write DIR [DIR]      # write docs/results/compare.json and .md from one or two runs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quoting import quote

from attendless.stamp import stamp_line
from attendless_cli.output import write_text

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, PAGE = DOCS / "results" / "compare.json", DOCS / "results" / "compare.md"
#: Fields of a conversion, and of a row at the largest size, that are copied to the results file.
CONVERTED = (
    *("headline", "attention", "data", "tokens", "size", "trained_at", "images", "dense_top1", "top1", "difference"),
    *("difference_ci", "agreement", "latency_ms", "dense_latency_ms", "speedup", "quartiles", "pairs", "cap"),
    *("peak_memory_mb", "dense_peak_memory_mb"),
)
COST = ("tokens", "ms", "speedup", "quartiles", "peak_memory_mb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("run", "write"))
    parser.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args()
    if options.part == "run":
        run(options.folders[0])
    else:
        write_text(RESULTS, json.dumps(summary(options.folders), indent=1, ensure_ascii=False) + "\n")
        quote(PAGE, "demo", block(json.loads(RESULTS.read_text())))


def run(folder: Path) -> None:
    if folder.exists():
        sys.exit(f"{folder} exists: the duration of a resumed demo is not meaningful; name a new folder")
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "attendless", "demo", "--out", str(folder)])
    took = time.monotonic() - began
    if done.returncode:
        sys.exit(done.returncode)
    write_text(folder / "took.json", json.dumps({"seconds": took}) + "\n")
    print(f"{took / 60:.1f} minutes")


def summary(folders: Sequence[Path]) -> dict[str, Any]:
    """The results of the first run, and the differences of a second run from them."""
    found = [
        {
            "seconds": json.loads((folder / "took.json").read_text())["seconds"],
            "conversion": json.loads((folder / "conversion.json").read_text()),
            **json.loads((folder / "results.json").read_text()),
        }
        for folder in folders
    ]
    one = found[0]
    rows = [
        {"attention": row["attention"], "top1": [run["top1"] for run in row["runs"]], "top1_mean": row["top1_mean"]}
        | {"top1_std": row["top1_std"]}
        | {name: row["curve"][-1][name] for name in COST}
        for row in one["rows"]
    ]
    return {
        "stamp": one["stamp"],
        "commands": ["python benchmarks/demo.py run DIR", "python benchmarks/demo.py write DIR [DIR]"],
        "minutes": [round(each["seconds"] / 60, 1) for each in found],
        "conversion": {name: one["conversion"][name] for name in CONVERTED},
        "rows": rows,
        "again": again(*found) if len(found) > 1 else None,
    }


def again(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Whether a second run has equal accuracies, and the largest relative change of a speed-up."""
    first, second = (
        [*(row["curve"][-1]["speedup"] for row in found["rows"]), found["conversion"]["speedup"]]
        for found in (one, two)
    )
    accuracies = [
        [*(run["top1"] for row in found["rows"] for run in row["runs"]), found["conversion"]["top1"]]
        for found in (one, two)
    ]
    changes = [abs(b / a - 1) for a, b in zip(first, second, strict=True)]
    return {"accuracies_equal": accuracies[0] == accuracies[1], "largest_change_of_a_ratio": max(changes)}


def block(found: dict[str, Any]) -> str:
    """The block of the page, in Markdown."""
    one, again = found["conversion"], found["again"]
    low, high = one["quartiles"]
    repeated = "It was run once."
    if again:
        equal = "identical" if again["accuracies_equal"] else "**not equal**"
        change = f"{100 * again['largest_change_of_a_ratio']:.0f} %"
        repeated = f"In a second run, the accuracies were {equal}, and speed-ups changed by at most {change}."
    lines = [
        f"> **{one['headline'][0].upper()}{one['headline'][1:]}.**",
        "",
        f"{one['images']:,} images: top-1 {one['dense_top1']:.1f} → {one['top1']:.1f} %, top-1 agreement "
        f"{100 * one['agreement']:.1f} %. Latency with one thread, fp32: {one['dense_latency_ms']:.0f} → "
        f"{one['latency_ms']:.0f} ms, {one['speedup']:.2f}× (quartiles {low:.2f}–{high:.2f}; maximum "
        f"{one['cap']:.1f}× by Amdahl's law). "
        f"Peak memory {one['dense_peak_memory_mb']:.0f} → {one['peak_memory_mb']:.0f} MB.",
        "",
        f"| attention, two seeds | top-1 % | ms at {found['rows'][0]['tokens']:,} tokens | speed-up | MB |",
        "|---|---|---|---|---|",
        *(
            f"| `{row['attention']}` | {row['top1_mean']:.1f} ± {row['top1_std']:.1f} | {row['ms']:.1f} | "
            f"{row['speedup']:.2f}× ({row['quartiles'][0]:.2f}–{row['quartiles'][1]:.2f}) "
            f"| {row['peak_memory_mb']:.0f} |"
            for row in sorted(found["rows"], key=lambda row: -row["top1_mean"])
        ),
        "",
        f"Duration: {' and '.join(map(str, found['minutes']))} minutes on two cores, without the installation. "
        f"{repeated}",
        "",
        stamp_line(found["stamp"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
