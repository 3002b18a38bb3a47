"""SAM's layers as timm computes them and as they are here: milliseconds and peak memory, nothing approximated.

    python benchmarks/sam.py [--size 1024] [--attention full foveal:keep=0.1] [--budget 60] [--threads 1]

One attention of ViT-B that sees the whole image, and one that sees windows, with random weights, batch 1; `full` is
exact. Contestants take turns in one process; memory is what a process of its own had at most, beyond what it had before
the layer ran.
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

#: In the order of the layers.
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
    print("\n| layer | attention | ms | times sooner (quartiles) | peak memory, MB | largest difference |")
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
                sooner = f"{found.ratio:.2f} ({found.quartiles[0]:.2f}–{found.quartiles[1]:.2f})"
                ms = f"{1e3 * timings.median(name):.0f}"
                print(f"| {kind} | {name} | {ms} | {sooner} | {used} | {off:.1e} |", flush=True)


def layer(kind: str, attention: str, size: int) -> nn.Module:
    """The attention of one layer: timm's own, or patched."""
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
    """Megabytes that one forward took at most."""
    one, x = layer(kind, attention, size), tokens(kind, size)
    one(x[:1, :14, :14])  # what libraries set up once
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew (Linux)
    before = resident("VmRSS")
    one(x)
    return (resident("VmHWM") - before) // 1024


def resident(key: str) -> int:
    """What Linux says of this process's memory, in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
