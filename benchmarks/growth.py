"""Time one layer of each attention against full attention at growing numbers of tokens.

    python benchmarks/growth.py [SPEC …] [--sides 16 24 32 48 64] [--prefix 0] [--threads 1] [--json F] [--publish]

At each side of a square grid the layers (projections included) run interleaved on the same tokens. Printed: latency in
ms, the exponent that fits time ~ tokens^exponent over all sides (and the same for multiply-accumulates), and the
speed-up over full attention at the largest side. A linear attention should have an exponent near 1 and a speed-up above
1; the exit code is 1 if one does not. --publish writes docs/results/growth.json and the table in
docs/results/attentions.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from quoting import publish
from study import by_machine, speed, table

from attendless import Attention, Context, Grid, create
from attendless.measure.clock import interleave
from attendless.stamp import stamp, stamp_line
from attendless_cli.output import write_json

#: Specs whose cost should be proportional to the tokens; the others should only be faster than full attention.
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
#: The largest exponent that still counts as linear: larger inputs leave the caches, and machines are busy.
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
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--publish", action="store_true", help="write the results file and the table of the page")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    machine = stamp()
    print(stamp_line(machine))
    print(f"one layer, width {options.dim}, {options.heads} heads, batch 1, fp32; ms by tokens", flush=True)
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

    rows, failed = [], []
    for spec in specs:
        versus = result.compare(spec, "full")
        grown, counted = exponent(tokens, times[spec]), exponent(tokens, macs[spec])
        if spec in LINEAR and not (grown <= NEARLY_LINEAR and versus.ratio > 1):
            failed.append(spec)
        points = zip(tokens, times[spec], macs[spec], strict=True)
        row = {"attention": spec, "exponent": grown, "macs_exponent": counted, "tokens": tokens[-1]}
        row |= {"speedup": versus.ratio, "quartiles": list(versus.quartiles), "spread": versus.spread}
        rows.append(row | {"growth": [{"tokens": n, "latency_ms": 1e3 * s, "macs": m} for n, s, m in points]})
    found = {"stamp": machine, "rows": rows}
    print(block({"": found}))
    write_json(options.json, found)
    if options.publish:
        publish("growth", machine, found)
    if failed:
        sys.exit(f"not linear, or slower than full attention: {', '.join(failed)}")


def block(found: Mapping[str, Any]) -> str:
    return by_machine(found, section)


def section(found: Mapping[str, Any]) -> str:
    """The table of one machine."""
    points = found["rows"][0]["growth"]
    last = f"speed-up at {points[-1]['tokens']:,}"
    columns = ["attention", *(f"{point['tokens']:,}" for point in points), "time^", "MACs^", last]
    lines = [
        [
            *(row["attention"], *(f"{point['latency_ms']:.2f}" for point in row["growth"])),
            *(f"{row['exponent']:.2f}", f"{row['macs_exponent']:.2f}", speed(row)),
        ]
        for row in found["rows"]
    ]
    return f"{table(columns, lines)}\n\n{stamp_line(found['stamp'])}"


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
