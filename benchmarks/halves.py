"""bf16 training of full attention on a CPU: PyTorch's fused kernel against matrix products with stored weights.

    python benchmarks/halves.py [--tokens 65 145 197 577 1025] [--budget 2]

Interleaved benchmark of the forward and backward pass of one attention in bf16 with one thread. The table shows the CPU
time in milliseconds and the speed-up of the matrix products: the median of paired ratios, with quartiles.
`attendless.sparse.fused` uses the matrix products when gradients are required. The batch is chosen so that every row
has about the same number of token pairs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from study import table
from torch.nn import functional as F

from attendless.measure.clock import interleave
from attendless.sparse import fused
from attendless.stamp import stamp, stamp_line

#: Token pairs per call, summed over batch and heads; the heads have 192 channels together.
PAIRS = 8e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65, 145, 197, 577, 1025])
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of timing per row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(tokens, width, args.budget) for tokens in args.tokens for width in (32, 64)]
    columns = ["tokens", "batch × heads × width", "fused kernel, ms", "matrix products, ms", "speed-up (quartiles)"]
    print(table(columns, rows))
    print(f"\n{stamp_line(stamp())}")


def row(tokens: int, width: int, budget: float) -> list[str]:
    heads = 192 // width
    batch = max(1, min(64, round(PAIRS / heads / tokens**2)))
    q, k, v = (torch.randn(batch, heads, tokens, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    given = torch.randn_like(q)
    calls = {
        "fused": lambda: F.scaled_dot_product_attention(q, k, v, scale=width**-0.5).backward(given),
        "products": lambda: fused.attend(q, k, v, scale=width**-0.5).backward(given),
    }
    found = interleave(calls, timer=thread_seconds, budget=budget)
    compared = found.compare("products", "fused")
    low, high = compared.quartiles
    ms = [f"{1e3 * found.median(name):.1f}" for name in calls]
    return [str(tokens), f"{batch} × {heads} × {width}", *ms, f"{compared.ratio:.1f} ({low:.1f}–{high:.1f})"]


def thread_seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
