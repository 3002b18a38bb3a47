"""Time full attention over merged tokens: our kernel against PyTorch's fused one, which takes token sizes as a mask.

    python benchmarks/remaining.py [--tokens 109 189 577 1025] [--batch 1 32] [--heads 3] [--budget 4] [--publish]

Heads of width 64, fp32, one thread, no gradients, interleaved, CPU time of the thread. --publish writes
docs/results/merged-attention.json and the table in docs/results/speed.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from halves import thread_seconds
from quoting import publish
from study import by_machine, speed, table

from attendless import execution
from attendless.measure.clock import interleave
from attendless.sparse.operations import remaining
from attendless.stamp import stamp, stamp_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[109, 189, 577, 1025])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for each row")
    parser.add_argument("--publish", action="store_true", help="write the results file and the table of the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [row(batch, args.heads, n, args.budget) for batch in args.batch for n in args.tokens]
    found = {"stamp": stamp(), "rows": rows}
    print(block({"": found}))
    if args.publish:
        publish("remaining", found["stamp"], found)


def block(found: Mapping[str, Any]) -> str:
    return by_machine(found, section)


def section(found: Mapping[str, Any]) -> str:
    """The table of one machine."""
    lines = [
        [str(row["batch"]), f"{row['tokens']:,}", f"{row['pytorch_ms']:.2f}", f"{row['ms']:.2f}", speed(row)]
        for row in found["rows"]
    ]
    columns = ["batch", "tokens", "PyTorch, ms", "ours, ms", "speed-up (quartiles)"]
    return f"{table(columns, lines)}\n\n{stamp_line(found['stamp'])}"


def row(batch: int, heads: int, tokens: int, budget: float) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(batch, tokens, 3, heads, 64, generator=draw).permute(2, 0, 3, 1, 4).unbind(0)
    bias = torch.randint(1, 5, (batch, tokens), generator=draw).float().log()

    def attend(by: str) -> torch.Tensor:
        with execution(by):
            return remaining(q, k, v, scale=64**-0.5, key_bias=bias)

    found = interleave({by: lambda by=by: attend(by) for by in ("sdpa", "native")}, timer=thread_seconds, budget=budget)
    compared = found.compare("native", "sdpa")
    ms = {by: 1e3 * found.median(by) for by in ("sdpa", "native")}
    about = {"batch": batch, "tokens": tokens, "pytorch_ms": ms["sdpa"], "ms": ms["native"]}
    return about | {"speedup": compared.ratio, "quartiles": list(compared.quartiles)}


if __name__ == "__main__":
    main()
