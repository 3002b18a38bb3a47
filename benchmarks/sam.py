"""Latency and peak memory of single attention layers of SAM ViT-B, in timm and with attendless.

    python benchmarks/sam.py [--size 1024] [--attention full foveal:keep=0.1] [--budget 60] [--threads 1]

The benchmark measures one layer with global attention and one with window attention, with random weights and batch 1.
`full` computes the same function as timm; other attentions approximate it. Latency comes from an interleaved benchmark
in one process. Peak memory is measured in a separate process, above the memory in use before the layer runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import attendless
from attendless.measure.clock import interleave
from attendless.stamp import stamp, stamp_line

#: The kind of attention of each layer, in order.
KINDS = ("window", "global")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--attention", nargs="+", default=["full", "foveal:keep=0.1"])
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.once:
        print(memory(*args.once, args.size))
        return
    print(stamp_line(stamp()))
    print("\n| layer | attention | ms | speed-up over timm (quartiles) | peak memory, MB | largest difference |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        names = ("timm", *args.attention) if kind == "global" else ("timm", "full")
        layers, x = {name: layer(kind, name, args.size) for name in names}, tokens(kind, args.size)
        with torch.inference_mode():
            exact = layers["timm"](x)
            timings = interleave({name: partial(one, x) for name, one in layers.items()}, budget=args.budget)
            for name, one in layers.items():
                again = [sys.executable, __file__, "--once", kind, name, "--size", str(args.size)]
                used = subprocess.run(again, check=True, capture_output=True, text=True).stdout.split()[-1]
                found, off = timings.compare(name, "timm"), float((one(x) - exact).abs().max())
                speedup = f"{found.ratio:.2f} ({found.quartiles[0]:.2f}–{found.quartiles[1]:.2f})"
                ms = f"{1e3 * timings.median(name):.0f}"
                print(f"| {kind} | {name} | {ms} | {speedup} | {used} | {off:.1e} |", flush=True)


def layer(kind: str, attention: str, size: int) -> nn.Module:
    """The attention module of one layer: timm's own, or with `attention` patched in."""
    torch.manual_seed(0)
    model: Any = timm.create_model("samvit_base_patch16", img_size=size, depth=2, global_attn_indexes=(1,)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    if attention != "timm":
        attendless.patch(model, attention, size=size, below_breakeven="keep")
    return model.blocks[KINDS.index(kind)].attn


def tokens(kind: str, size: int) -> Tensor:
    side = size // 16
    windows = (-(-side // 14)) ** 2
    return torch.randn(1, side, side, 768) if kind == "global" else torch.randn(windows, 14, 14, 768)


@torch.inference_mode()
def memory(kind: str, attention: str, size: int) -> int:
    """Peak memory of one forward pass in MB, above the memory in use before."""
    one, x = layer(kind, attention, size), tokens(kind, size)
    one(x[:1, :14, :14])  # allocates what libraries set up at the first call
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (Linux)
    before = resident("VmRSS")
    one(x)
    return (resident("VmHWM") - before) // 1024


def resident(key: str) -> int:
    """A field of this process's memory statistics in kilobytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
