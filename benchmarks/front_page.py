"""The front page's picture: DeiT-Tiny's accuracy against its milliseconds, dense and converted, in three runtimes.

    python benchmarks/front_page.py accuracy WEIGHTS IMAGES [--size 384] [--limit N]
    python benchmarks/front_page.py speed WEIGHTS [--size 384] [--budget 10]        # wants a machine to itself
    python benchmarks/front_page.py draw

Each adds what it found at its size to docs/results/front-page.json; `draw` makes docs/front-page.svg and README's table
of it. A runtime computes the same function, which `export` checks before it writes a file, so accuracies are PyTorch's.
ONNX Runtime has our kernels (`--kernels`); timm's model is there as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from quoting import quote

from attendless import convert, open_model
from attendless.data.opening import open_data
from attendless.measure.accuracy import evaluate, preprocessing
from attendless.measure.bench import Conditions, bench_rows
from attendless.show.figures import new_figure, save_figure
from attendless.sizes import parse_size
from attendless.stamp import stamp, stamp_line
from attendless_cli.output import progress, write_text

MODEL, ATTENTION = "deit_tiny_patch16_224", "foveal:keep=0.1"
RUNTIMES = ("eager", "onnx-kernels", "openvino")
DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS / "results" / "front-page.json"
#: How each runtime is called and marked.
NAMES = {"eager": ("PyTorch", "o"), "onnx-kernels": ("ONNX Runtime", "s"), "openvino": ("OpenVINO", "D")}
COLOURS = {"timm": "#59636e", "attendless": "#0072b2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("accuracy", "speed"):
        part = parts.add_parser(name)
        part.add_argument("weights")
        if name == "accuracy":
            part.add_argument("images", help="a folder per class")
            part.add_argument("--limit", type=int, help="so many of them, spread evenly")
        else:
            part.add_argument("--budget", type=float, default=10.0, help="seconds for each contestant")
        part.add_argument("--size", type=int, default=384)
    parts.add_parser("draw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "draw":
        found = json.loads(RESULTS.read_text())
        draw(found)
        quote(DOCS.parent / "README.md", "front-page", block(found))
        return
    rows = accuracy(options) if options.part == "accuracy" else speed(options)
    keep(options.part, options.size, rows)


def keep(part: str, size: int, rows: list[dict[str, Any]]) -> None:
    """Put the rows in the place of those found before, each with the machine and the command that found it."""
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"accuracy": [], "speed": []}
    words = ["WEIGHTS" if w.endswith(".safetensors") else "IMAGES" if "/" in w else w for w in sys.argv[1:]]
    about = {"stamp": stamp(), "command": " ".join(["python benchmarks/front_page.py", *words])}
    known[part] = [row for row in known[part] if row["size"] != size] + [row | about for row in rows]
    write_text(RESULTS, json.dumps(known, indent=1, allow_nan=False) + "\n")


def accuracy(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Top-1 of the dense and the converted model on the same images, scaled to the size asked for, cropped square."""
    size = parse_size(options.size)
    dense = open_model(MODEL, weights=options.weights, size=size).eval()
    models = {"full": dense, ATTENTION: convert(dense, ATTENTION, below_breakeven="keep").eval()}
    source, prepare = open_data(options.images, "val"), preprocessing(dense, size, 1.0)
    with progress("images", options.limit or len(source)) as step:
        found = evaluate(dense, models, source, prepare, limit=options.limit, batch=4, workers=0, progress=step)
    return [{"size": options.size, "attention": name} | dataclasses.asdict(one) for name, one in found.items()]


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of both models in every runtime, all by turns in one process."""
    how = Conditions(threads=1, budget=options.budget, progress=lambda text: print(text, flush=True))
    failures: list[str] = []
    opening = {"runtimes": RUNTIMES, "failures": failures, "weights": options.weights}
    measured = list(bench_rows(MODEL, [ATTENTION], [options.size], how, **opening))
    if failures:
        sys.exit("\n".join(failures))
    kept = ("runtime", "attention", "tokens", "latency_ms", "speedup", "quartiles", "spread", "pairs", "left", "cap")
    more = ("eager_speedup", "eager_spread")
    return [
        {"size": options.size, "who": "timm" if row.setup.path == "timm" else "attendless"}
        | {name: row.as_dict()[name] for name in (*kept, *more)}
        for row in measured
    ]


def draw(found: dict[str, Any]) -> None:
    """Two panels, one a size: who is how accurate after how many milliseconds."""
    sizes = sorted({row["size"] for row in found["speed"]})
    figure = new_figure(9.2, 3.9)
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        judged = {row["attention"]: row for row in found["accuracy"] if row["size"] == size}
        timed = sorted((row for row in found["speed"] if row["size"] == size), key=lambda row: row["latency_ms"])
        for who, colour in COLOURS.items():
            score = judged["full" if who == "timm" else ATTENTION]["top1"]
            away = 1 if (who == "timm") == (judged["full"]["top1"] > judged[ATTENTION]["top1"]) else -1
            for place, row in enumerate(row for row in timed if row["who"] == who):
                name, shape = NAMES[row["runtime"]]
                axes.plot(row["latency_ms"], score, shape, color=colour, markersize=8)
                axes.annotate(
                    f"{name}: {row['latency_ms']:,.0f} ms, {row['eager_speedup']:.2f}×",
                    (row["latency_ms"], score),
                    xytext=(-6, away * (16 + 17 * place)),
                    textcoords="offset points",
                    ha="right" if row["latency_ms"] > timed[-1]["latency_ms"] / 2 else "left",
                    va="center",
                    fontsize=8,
                    color=colour,
                    arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.5},
                )
        middle = sum(row["top1"] for row in judged.values()) / 2
        axes.set(ylim=(middle - 4, middle + 4), xlim=(0, 1.08 * timed[-1]["latency_ms"]))
        tokens = next(row["tokens"] for row in timed if row["tokens"])
        axes.set(xlabel="ms an image, one thread", title=f"{size:,} px, {tokens:,} tokens")
        axes.set_ylabel(f"top-1 %, {judged['full']['images']:,} images")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [figure.axes[0].plot([], [], "o", color=colour)[0] for colour in COLOURS.values()]
    words = ["timm's DeiT-Tiny", f"attendless, {ATTENTION}, not trained"]
    figure.legend(handles, words, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    save_figure(figure, DOCS / "front-page.svg")


def block(found: dict[str, Any]) -> str:
    """README's table: milliseconds and how many times sooner than timm in PyTorch, and what of the answers is left."""
    lines = [
        "| DeiT-Tiny, pretrained | | PyTorch | ONNX Runtime | OpenVINO | top-1 | same answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in sorted({row["size"] for row in found["speed"]}):
        judged = {row["attention"]: row for row in found["accuracy"] if row["size"] == size}
        for who, attention in (("timm", "full"), ("attendless", ATTENTION)):
            rows = {r["runtime"]: r for r in found["speed"] if (r["size"], r["who"]) == (size, who)}
            times = (f"{rows[r]['latency_ms']:,.0f} ms, {rows[r]['eager_speedup']:.2f}×" for r in RUNTIMES)
            one = judged[attention]
            low, high = one["difference_ci"]
            paired = f" ({one['difference']:+.1f}: {low:+.1f} to {high:+.1f})".replace("-", "−")
            ours = paired if who == "attendless" else ""
            name = f"`{ATTENTION}`, not trained" if who == "attendless" else "timm"
            same = f"{100 * one['agreement']:.1f} %" if who == "attendless" else ""
            lines.append(f"| {size:,} px | {name} | {' | '.join(times)} | {one['top1']:.1f}{ours} | {same} |")
    counts = {row["size"]: row["images"] for row in found["accuracy"]}
    images = ", ".join(f"{count:,} at {size:,} px" for size, count in sorted(counts.items()))
    about = (
        "One thread, batch 1, all by turns; × timm in PyTorch. ONNX Runtime and OpenVINO run our kernels. ImageNet's "
        f"validation images ({images}; files of a short side of 384 px, so larger ones are scaled up); the difference "
        "is paired, with its 95 % interval. "
        f"{stamp_line(found['speed'][-1]['stamp'])}. [Every number](docs/results/front-page.json), by "
        "`python benchmarks/front_page.py`."
    )
    return "\n".join([*lines, "", about])


if __name__ == "__main__":
    main()
