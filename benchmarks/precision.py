"""Speed-up of bf16 over fp32: attention kernels, PyTorch's fused attention, and whole models in OpenVINO.

    python benchmarks/precision.py --out precision.json

Interleaved benchmark with one thread; speed-ups are medians of paired ratios. Run it on an otherwise idle CPU with bf16
instructions. Other CPUs emulate bf16, so their results are meaningless; `--anyway` runs the benchmark there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from attendless.export.runner import open_runner
from attendless.measure.precision import no_bf16
from attendless.sparse import foveal, native
from attendless.stamp import stamp

HEADS, WIDTH = 3, 64
SCALE = WIDTH**-0.5
#: Grid sides with a class token: 197, 577, 1,025 and 4,097 tokens.
SIDES = (14, 24, 32, 64)
#: The expected minimum of each ratio, by number of tokens or image size.
BARS = {
    "foveal, bf16 over fp32": {1025: 1.5, 4097: 1.5},
    "full, kernel over PyTorch, both bf16": {197: 1.4, 577: 1.4, 1025: 1.4},
    "OpenVINO, foveal over the unmodified model": {384: 1.3, 1024: 2.6},
}


def ratios(slow: Callable[[], Any], fast: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Median seconds of both calls, and the median of the ratios slow / fast of consecutive calls."""
    pairs: list[tuple[float, float]] = []
    slow(), fast()
    end = time.perf_counter() + seconds
    while len(pairs) < 5 or time.perf_counter() < end:
        taken = []
        for run in (slow, fast):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        pairs.append((taken[0], taken[1]))
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"slow": first, "fast": second, "ratio": statistics.median(a / b for a, b in pairs), "pairs": len(pairs)}


def operators(seconds: float) -> dict[str, dict[int, dict[str, float]]]:
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in list(BARS)[:2]}
    for side in SIDES:
        tokens = side * side + 1
        draws = torch.Generator().manual_seed(side)
        wide = torch.randn(1, tokens, 3, HEADS, WIDTH, generator=draws)
        low = wide.bfloat16()
        layout = foveal.layout(side, side, 1, keep=0.1)
        every = torch.arange(tokens, dtype=torch.int32)
        ends = torch.tensor([0, tokens], dtype=torch.int32)

        def attend(packed: torch.Tensor, sizes: tuple[int, ...] = layout.sizes) -> Any:
            q, k, v = packed.permute(2, 0, 3, 1, 4)
            return native.functions.foveal_forward(q, k, v, None, None, list(sizes), SCALE)

        found["foveal, bf16 over fp32"][tokens] = ratios(
            lambda wide=wide, run=attend: run(wide), lambda low=low, run=attend: run(low), seconds
        )
        q, k, v = low.permute(2, 0, 3, 1, 4)
        lists = [ends, every, ends, every]
        found["full, kernel over PyTorch, both bf16"][tokens] = ratios(
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, scale=SCALE),
            lambda q=q, k=k, v=v, lists=lists: native.functions.block_attend(q, k, v, None, lists, SCALE),
            seconds,
        )
    return found


def in_openvino(model: str, sizes: list[int], seconds: float, folder: Path) -> dict[str, dict[int, dict[str, float]]]:
    import attendless

    found: dict[str, dict[int, dict[str, float]]] = {}
    for precision in ("fp32", "bf16"):
        rows = found.setdefault(f"OpenVINO, foveal over the unmodified model, {precision}", {})
        for size in sizes:
            runs = []
            for attention in ("full", "foveal:keep=0.1"):
                path = folder / f"{precision}-{size}-{len(runs)}.xml"
                changed = attendless.convert(model, attention=attention, size=size)
                attendless.export(changed, path, precision=precision, batch=1, measure=False)
                runs.append(open_runner(path, threads=1))
            image = torch.randn(1, 3, size, size)
            rows[size] = ratios(
                lambda run=runs[0], image=image: run(image), lambda run=runs[1], image=image: run(image), seconds
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("precision.json"), help="results file")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of timing per pair of variants")
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="the model for OpenVINO")
    parser.add_argument("--sizes", type=int, nargs="*", default=[384, 1024], help="image sizes; empty: no models")
    parser.add_argument("--anyway", action="store_true", help="run on a CPU that emulates bf16")
    arguments = parser.parse_args()
    if (why := no_bf16()) and not arguments.anyway:
        parser.error(f"{why}; --anyway runs nevertheless")
    torch.set_num_threads(1)
    found = operators(arguments.seconds)
    if arguments.sizes:
        folder = arguments.out.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        found |= in_openvino(arguments.model, arguments.sizes, arguments.seconds, folder)
    for name, rows in found.items():
        bars = next((bar for start, bar in BARS.items() if name.startswith(start)), {})
        for size, row in rows.items():
            expected = f", expected at least {bars[size]}×" if size in bars else ""
            print(f"{name} {size}: {row['slow'] * 1e3:.2f} → {row['fast'] * 1e3:.2f} ms, {row['ratio']:.2f}×{expected}")
    about = {"instruction_set": native.instruction_set(), "machine": stamp(), "figures": found}
    arguments.out.write_text(json.dumps(about, indent=1, default=str))


if __name__ == "__main__":
    main()
