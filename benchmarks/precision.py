"""Latency of one attention in fp32, bf16 and int8: foveal attention, and full attention against PyTorch's fused kernel.

    python benchmarks/precision.py --publish

Interleaved benchmark with one thread, three heads of 64 channels; speed-ups are medians of paired ratios. Run it on an
otherwise idle CPU with bf16 instructions. Other CPUs emulate bf16, so their results are meaningless; `--anyway` runs
the benchmark there. Whole models: `attendless bench --precision fp32 bf16 int8`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from quoting import publish
from study import by_machine, table
from torch import Tensor
from torch.nn import functional as F

from attendless.measure.precision import no_bf16
from attendless.sparse import foveal, native
from attendless.stamp import stamp, stamp_line

HEADS, WIDTH = 3, 64
SCALE = WIDTH**-0.5
#: Grid sides with a class token: 197, 577, 1,025 and 4,097 tokens.
SIDES = (14, 24, 32, 64)
#: Each variant and the one that it is compared with.
VARIANTS = {
    "foveal, fp32": None,
    "foveal, bf16": "foveal, fp32",
    "foveal, int8": "foveal, fp32",
    "full, PyTorch, fp32": None,
    "full, PyTorch, bf16": "full, PyTorch, fp32",
    "full, ours, bf16": "full, PyTorch, bf16",
}


def variants(side: int) -> dict[str, Callable[[], Any]]:
    """The calls that are compared, by the names of VARIANTS."""
    tokens = side * side + 1
    wide = torch.randn(1, tokens, 3, HEADS, WIDTH, generator=torch.Generator().manual_seed(side))
    every, ends = torch.arange(tokens, dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    parts = {"fp32": wide.permute(2, 0, 3, 1, 4), "bf16": wide.bfloat16().permute(2, 0, 3, 1, 4)}

    def attend(qkv: Tensor, int8: bool = False) -> Any:
        layout = foveal.layout(side, side, 1, keep=0.1, int8=int8)
        return native.functions.foveal_forward(*qkv, None, None, list(layout.sizes), SCALE)

    return {
        "foveal, fp32": lambda: attend(parts["fp32"]),
        "foveal, bf16": lambda: attend(parts["bf16"]),
        "foveal, int8": lambda: attend(parts["bf16"], int8=True),
        "full, PyTorch, fp32": lambda: F.scaled_dot_product_attention(*parts["fp32"], scale=SCALE),
        "full, PyTorch, bf16": lambda: F.scaled_dot_product_attention(*parts["bf16"], scale=SCALE),
        "full, ours, bf16": lambda: native.functions.block_attend(
            *parts["bf16"], None, [ends, every, ends, every], SCALE
        ),
    }


def measure(side: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Median milliseconds of every variant, and the ratio to the one that it is compared with, with its quartiles."""
    runs = variants(side)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken["foveal, fp32"]) < 9:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    found: dict[str, dict[str, Any]] = {}
    for name, other in VARIANTS.items():
        found[name] = {"ms": 1e3 * statistics.median(taken[name]), "rounds": len(taken[name])}
        if other:
            ratios = sorted(a / b for a, b in zip(taken[other], taken[name], strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4)
            found[name] |= {"over": other, "ratio": middle, "quartiles": [low, high]}
    return found


def block(found: Mapping[str, Any]) -> str:
    return by_machine(found, section)


def section(found: Mapping[str, Any]) -> str:
    """The table of one machine."""
    lines = []
    for name, other in VARIANTS.items():
        cells = []
        for row in found["rows"].values():
            cells.append(f"{row[name]['ms']:.2f}")
            if other:
                low, high = row[name]["quartiles"]
                cells[-1] += f", {row[name]['ratio']:.2f}× ({low:.2f}–{high:.2f})"
        lines.append([name, other or "", *cells])
    columns = ["attention", "speed-up over", *(f"{int(tokens):,} tokens, ms" for tokens in found["rows"])]
    return f"{table(columns, lines)}\n\nInstruction set `{found['isa']}`. {stamp_line(found['stamp'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds of timing per number of tokens")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/results/precision.json and docs/precision.md"
    )
    parser.add_argument("--anyway", action="store_true", help="run on a CPU that emulates bf16")
    arguments = parser.parse_args()
    if (why := no_bf16()) and not arguments.anyway:
        parser.error(f"{why}; --anyway runs nevertheless")
    torch.set_num_threads(1)
    rows = {str(side * side + 1): measure(side, arguments.seconds) for side in SIDES}
    found = {"stamp": stamp(), "isa": native.instruction_set(), "rows": rows}
    print(section(found))
    if arguments.publish:
        publish("precision", found["stamp"], found)


if __name__ == "__main__":
    main()
