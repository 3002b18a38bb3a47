"""Full attention over merged tokens: the compiled kernel against PyTorch's fused one, which takes sizes as a mask.

    python benchmarks/remaining.py [--tokens 109 189 577 1025] [--batch 1 32] [--heads 3] [--budget 4]

Heads of width 64 in 32-bit floats, one thread, no gradients, by turns, in seconds of the thread's own processor time:
milliseconds of each, and the median of paired ratios with quartiles.
"""

from __future__ import annotations

import argparse

import torch
from halves import thread_seconds
from study import table

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
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [row(batch, args.heads, n, args.budget) for batch in args.batch for n in args.tokens]
    print(table(["batch", "tokens", "PyTorch, ms", "ours, ms", "× sooner (quartiles)"], rows))
    print(f"\n{stamp_line(stamp())}")


def row(batch: int, heads: int, tokens: int, budget: float) -> list[str]:
    draw = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(batch, tokens, 3, heads, 64, generator=draw).permute(2, 0, 3, 1, 4).unbind(0)
    bias = torch.randint(1, 5, (batch, tokens), generator=draw).float().log()

    def attend(by: str) -> torch.Tensor:
        with execution(by):
            return remaining(q, k, v, scale=64**-0.5, key_bias=bias)

    found = interleave({by: lambda by=by: attend(by) for by in ("sdpa", "native")}, timer=thread_seconds, budget=budget)
    compared = found.compare("native", "sdpa")
    low, high = compared.quartiles
    ms = [f"{1e3 * found.median(by):.2f}" for by in ("sdpa", "native")]
    return [str(batch), f"{tokens:,}", *ms, f"{compared.ratio:.2f} ({low:.2f}–{high:.2f})"]


if __name__ == "__main__":
    main()
