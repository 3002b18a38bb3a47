"""What copies into 32-bit floats and back cost the kernels where a model is in bfloat16.

    python benchmarks/bf16.py [--tokens 577 1025 4097] [--budget 8]

Forward, batch 1, 3 heads of width 64, `keep` 0.1, one thread, by turns, in seconds of the thread's own processor time:
milliseconds with q, k, v and the result copied, in bfloat16 as they are, and in 32-bit floats from the start; and the
median of paired ratios of the first two with quartiles. The attentions are those of benchmarks/attention.py.
"""

from __future__ import annotations

import argparse

import torch
from attention import contestants, inputs
from halves import thread_seconds
from study import table

from attendless import execution
from attendless.measure.clock import interleave
from attendless.stamp import stamp, stamp_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[577, 1025, 4097])
    parser.add_argument("--budget", type=float, default=8.0, help="seconds for each attention and number of tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with execution("native"), torch.inference_mode():
        rows = [row(name, n, args.budget) for name in ("foveal", "block", "gather") for n in args.tokens]
    columns = ["attention", "tokens", "copied, ms", "bf16, ms", "fp32, ms", "× sooner than copied (quartiles)"]
    print(table(columns, rows))
    print(f"\n{stamp_line(stamp())}")


def row(name: str, tokens: int, budget: float) -> list[str]:
    run = contestants(tokens, 0.1)[name]
    packed = torch.stack(inputs(tokens), 2).permute(0, 3, 2, 1, 4).contiguous()  # as a projection leaves it
    wide, low = (x.permute(2, 0, 3, 1, 4).unbind(0) for x in (packed, packed.bfloat16()))
    calls = {
        "copied": lambda: run(*(x.float() for x in low)).bfloat16(),
        "bf16": lambda: run(*low),
        "fp32": lambda: run(*wide),
    }
    if not torch.equal(calls["copied"](), calls["bf16"]()):
        raise SystemExit(f"{name} of {tokens} tokens: the kernel rounds otherwise than a copy does")
    found = interleave(calls, timer=thread_seconds, budget=budget)
    compared = found.compare("bf16", "copied")
    low_end, high_end = compared.quartiles
    ms = [f"{1e3 * found.median(call):.2f}" for call in calls]
    return [name, f"{tokens:,}", *ms, f"{compared.ratio:.2f} ({low_end:.2f}–{high_end:.2f})"]


if __name__ == "__main__":
    main()
