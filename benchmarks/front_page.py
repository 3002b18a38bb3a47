"""The README's table and figure: a pretrained model, unmodified in the best runtime, and as `optimize` chose it.

    attendless optimize deit_tiny_patch16_224 --weights W --data IMAGES --max-drop 1.0 --threads 1 --out fast/
    attendless eval fast/ --data OTHER --weights W --json eval.json
    python benchmarks/front_page.py add fast/ eval.json [--name DeiT-Tiny]
    python benchmarks/front_page.py draw

`add` copies the measurements of an `optimize` run, and the accuracy of its file on other images, to
docs/results/front-page.json. It replaces an earlier run of the same model and image size. `draw` makes
docs/front-page.svg and the table of the README.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from quoting import quote

from attendless.show.figures import new_figure, save_figure
from attendless.stamp import stamp_line
from attendless_cli.output import write_text

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS / "results" / "front-page.json"
PRECISIONS = ("fp32", "bf16", "int8")
RUNTIMES = {"eager": "PyTorch", "compile": "torch.compile", "onnx": "ONNX Runtime", "onnx-kernels": "ONNX Runtime"}
RUNTIMES |= {"openvino": "OpenVINO"}
KEPT = ("runtime", "precision", "attention", "tokens_spec", "unmodified", "latency_ms", "original_ms", "speedup")
KEPT += ("quartiles", "pairs", "expected_drop", "expected_drop_ci", "agreement", "images")
COLOURS = {"unmodified model": "#59636e", "with attendless": "#0072b2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("add")
    part.add_argument("folder", type=Path, help="the output folder of attendless optimize")
    part.add_argument("eval", type=Path, help="JSON of attendless eval of the folder, on other images")
    part.add_argument("--name", default="DeiT-Tiny", help="the model's name in the table")
    parts.add_parser("draw")
    options = parser.parse_args()
    if options.part == "add":
        manifest = json.loads((options.folder / "manifest.json").read_text())
        add(manifest, json.loads(options.eval.read_text()), options.name)
    else:
        found = json.loads(RESULTS.read_text())
        draw(found)
        quote(DOCS.parent / "README.md", "front-page", block(found))


def add(manifest: dict[str, Any], judged: dict[str, Any], name: str) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"runs": []}
    row = judged["rows"][-1]
    run = {
        "name": name,
        "size": manifest["size"][-1],
        "command": without_folders(manifest["command"]),
        "stamp": manifest["stamp"],
        "goal": manifest["goal"],
        "fresh": manifest["fresh"],
        "judged": {key: row[key] for key in ("images", "top1", "agreement", "difference", "difference_ci")},
        "chosen": {key: manifest["chosen"][key] for key in KEPT},
        "variants": [{key: row[key] for key in KEPT} for row in manifest["variants"]],
    }
    others = [one for one in known["runs"] if (one["name"], one["size"]) != (name, run["size"])]
    known["runs"] = sorted([*others, run], key=lambda one: (one["name"], one["size"]))
    write_text(RESULTS, json.dumps(known, indent=1, allow_nan=False) + "\n")


def without_folders(command: str) -> str:
    """A command with each absolute path reduced to its last part, so that it names no folders of this machine."""
    return re.sub(r"(?:/[^\s/]+)+/([^\s/]+)", r"\1", command)


def fastest(run: dict[str, Any], precision: str, unmodified: bool) -> dict[str, Any] | None:
    """The fastest variant of a precision within the run's limit; the chosen one in its own precision."""
    chosen, limit = run["chosen"], run["goal"]["max_drop"]
    if not unmodified and not chosen["unmodified"] and chosen["precision"] == precision:
        return chosen
    rows = [row for row in run["variants"] if (row["precision"], row["unmodified"]) == (precision, unmodified)]
    rows = [row for row in rows if row["expected_drop"] <= limit and row["runtime"] != "eager"]
    return max(rows, key=lambda row: row["speedup"], default=None)


def best_without(run: dict[str, Any]) -> float:
    """The speed-up of the fastest unmodified variant within the limit, over PyTorch eager in fp32."""
    found = (fastest(run, precision, unmodified=True) for precision in PRECISIONS)
    return max((row["speedup"] for row in found if row), default=1.0)


def draw(found: dict[str, Any]) -> None:
    """A panel for each run: speed-up over PyTorch eager, without and with attendless, in each measured precision."""
    figure = new_figure(9.2, 2.9)
    panels = figure.subplots(1, len(found["runs"]), squeeze=False, sharey=True)[0]
    for axes, run in zip(panels, found["runs"], strict=True):
        precisions = [p for p in PRECISIONS if fastest(run, p, True) or fastest(run, p, False)]
        for shift, (series, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
            rows = [fastest(run, precision, series == "unmodified model") for precision in precisions]
            places = [place + shift for place, row in enumerate(rows) if row]
            bars = axes.bar(places, [row["speedup"] for row in rows if row], 0.38, color=colour)
            axes.bar_label(bars, fmt="%.2f×", fontsize=9)
        axes.axhline(1, color="#59636e", linewidth=0.8, linestyle=":")
        axes.set(xticks=range(len(precisions)), xticklabels=precisions, xlim=(-0.6, len(precisions) - 0.4))
        axes.set_title(f"{run['name']}, {run['size']:,} px", fontsize=10)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("speed-up over timm, PyTorch fp32", fontsize=9)
    handles = [figure.axes[0].bar(0, 0, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    save_figure(figure, DOCS / "front-page.svg")


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['latency_ms']:,.1f} ms, {row['speedup']:.2f}× ({RUNTIMES[row['runtime']]})"


def changes(row: dict[str, Any]) -> str:
    """What attendless changed in a variant."""
    attention = "" if row["attention"] == "full" else "sparse attention"
    return " and ".join(filter(None, ["token merging" if row["tokens_spec"] else "", attention])) or "last layer"


def accuracy(run: dict[str, Any]) -> str:
    """Top-1 of the original and of the chosen file, and the difference with its interval."""
    judged = run["judged"]
    low, high = judged["difference_ci"]
    change = f"{judged['difference']:+.1f} ({low:+.1f} to {high:+.1f})".replace("-", "−")
    return f"{judged['top1'] - judged['difference']:.1f} → {judged['top1']:.1f} %: {change}"


def block(found: dict[str, Any]) -> str:
    """The README's table: latency and speed-up over timm in eager fp32, and the accuracy drop of the chosen file."""
    columns = ["", "", *PRECISIONS, "chosen, over the fastest unmodified", "top-1 (difference, 95 % interval)"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for run in found["runs"]:
        where, chosen = f"{run['name']}, {run['size']:,} px", run["chosen"]
        first = next(row for row in run["variants"] if row["unmodified"] and row["runtime"] == "eager")
        rest = [cell(fastest(run, precision, unmodified=True)) for precision in PRECISIONS]
        ours = [cell(fastest(run, precision, unmodified=False)) for precision in PRECISIONS]
        ours = [f"**{text}**" if p == chosen["precision"] else text for p, text in zip(PRECISIONS, ours, strict=True)]
        gain = f"**{chosen['speedup'] / best_without(run):.2f}×** by {changes(chosen)}"
        lines += [
            f"| {where} | timm, PyTorch | {first['latency_ms']:,.1f} ms | | | | |",
            f"| | unmodified, fastest runtime | {' | '.join(rest)} | | |",
            f"| | with `attendless optimize` | {' | '.join(ours)} | {gain} | {accuracy(run)} |",
        ]
    images = {run["judged"]["images"] for run in found["runs"]}
    about = (
        "Latency per image and speed-up over timm in PyTorch fp32; one thread, batch 1. Limit: an expected "
        f"drop of {found['runs'][0]['goal']['max_drop']:g} percentage point. The chosen file is bold; its top-1 is "
        f"that on {' and '.join(f'{count:,}' for count in sorted(images))} ImageNet images that `optimize` did not see "
        "(the weights were trained at 224 px, so compare rows of one size only). "
        "–: not tried, because the unmodified model is faster in another precision. "
        f"{stamp_line(found['runs'][-1]['stamp'])}. [Every variant](docs/results/front-page.json)."
    )
    return "\n".join([*lines, "", about])


if __name__ == "__main__":
    main()
