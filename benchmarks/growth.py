"""How does cost grow with the tokens? One layer of every attention against full attention, in one run.

    python benchmarks/growth.py [SPEC …] [--sides 16 24 32 48 64] [--prefix 0] [--threads 1] [--markdown] [--json F]

At each side the layers (projections included) take turns on the same tokens of a square grid. Printed: milliseconds,
the exponent that fits time ~ tokens^exponent over all sides (and the same for multiply-accumulates), and how many times
quicker than full attention the layer was at the largest side. Expected of what is linear: an exponent near 1, and a
ratio above 1. The exit code is 1 if a linear one fails.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from attendless import Attention, Context, Grid, create
from attendless.measure.clock import interleave
from attendless.stamp import stamp, stamp_line
from attendless_cli.output import write_json

#: Specs whose cost ought to be proportional to the tokens, and some that ought to beat full attention only.
LINEAR = (
    "linformer",
    "efficient",
    "performer",
    "performer:features=64",
    "fastformer",
    "xca",
    "window",
    "window:shift=3",
    "reduced:pool=7",
)
OTHERS = (
    "reduced",
    "reduced:ratio=4",
    "linformer:ratio=8,shared,bias",
    "axial",
    "bigbird",
    "foveal:keep=0.25",
    "foveal:keep=0.1",
)
#: Room for what a clock on a busy machine adds to an exponent of 1, caches outgrown included.
NEARLY_LINEAR = 1.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", default=[*LINEAR, *OTHERS])
    parser.add_argument("--sides", type=int, nargs="+", default=[16, 24, 32, 48, 64])
    parser.add_argument("--prefix", type=int, default=0, help="class and register tokens in front of the grid")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25, help="rounds at each side, at least")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of measurement for each side")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    machine = stamp()
    print(stamp_line(machine))
    print(f"one layer, width {options.dim}, {options.heads} heads, batch 1, fp32; milliseconds by tokens", flush=True)
    specs = ["full", *(spec for spec in options.specs if spec != "full")]
    tokens = [side**2 + options.prefix for side in options.sides]
    times: dict[str, list[float]] = {spec: [] for spec in specs}
    macs: dict[str, list[int]] = {spec: [] for spec in specs}
    for side in options.sides:
        grid = Grid(side, side, options.prefix)
        layers = {spec: create(spec, options.dim, options.heads, grid=grid).eval() for spec in specs}
        x = torch.randn(1, grid.tokens, options.dim)
        result = interleave(
            {spec: call(layer, x, Context(grid)) for spec, layer in layers.items()},
            budget=options.budget,
            rounds=options.rounds,
        )
        for spec, layer in layers.items():
            times[spec].append(result.median(spec))
            macs[spec].append(layer.macs(grid).total)

    columns = ["attention", *(f"{n:,}" for n in tokens), "time^", "MACs^", f"vs full at {tokens[-1]:,}"]
    line = markdown if options.markdown else plain
    print(line(columns))
    if options.markdown:
        print(line(["---"] * len(columns)))
    rows, failed = [], []
    for spec in specs:
        versus = result.compare(spec, "full")
        grown, counted = exponent(tokens, times[spec]), exponent(tokens, macs[spec])
        quartiles = f"{versus.ratio:.2f}x ({versus.quartiles[0]:.2f}–{versus.quartiles[1]:.2f})"
        print(line([spec, *(f"{1e3 * s:.2f}" for s in times[spec]), f"{grown:.2f}", f"{counted:.2f}", quartiles]))
        if spec in LINEAR and not (grown <= NEARLY_LINEAR and versus.ratio > 1):
            failed.append(spec)
        points = zip(tokens, times[spec], macs[spec], strict=True)
        row = {"attention": spec, "exponent": grown, "macs_exponent": counted, "tokens": tokens[-1]}
        row |= {"speedup": versus.ratio, "spread": versus.spread}
        rows.append(row | {"growth": [{"tokens": n, "latency_ms": 1e3 * s, "macs": m} for n, s, m in points]})
    write_json(options.json, {"stamp": machine, "rows": rows})
    if failed:
        sys.exit(f"not linear, or slower than full attention: {', '.join(failed)}")


def plain(cells: Sequence[str]) -> str:
    return f"{cells[0]:<32}" + "".join(f"{cell:>9}" for cell in cells[1:-1]) + f"  {cells[-1]}"


def markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def call(layer: Attention, x: torch.Tensor, context: Context) -> Callable[[], None]:
    def forward() -> None:
        with torch.inference_mode():
            layer(x, context)

    return forward


def exponent(tokens: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log cost over log tokens, by least squares."""
    return float(np.polyfit([math.log(n) for n in tokens], [math.log(cost) for cost in costs], 1)[0])


if __name__ == "__main__":
    main()
