"""Are the verdicts of the interleaved benchmark reliable? Compare equal calls, then calls with a known slowdown.

    python benchmarks/planted.py [--repeats 20] [--slowdown 0.2] [--size 224] [--threads 1] [--idle]

The benchmark compares a DeiT-Tiny forward pass with itself, and with a copy that is artificially slowed down. Another
process keeps one core busy (unless `--idle`). Expected: the slowdown is distinguishable in at least 19 of 20 repeats,
the equal pair in at most 1 of 20.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import timm
import torch

from attendless.measure.clock import Comparison, interleave
from attendless.stamp import stamp, stamp_line

# The busy process ends when its parent ends, even if the parent is killed.
BUSY = "import os, numpy as np\na, parent = np.random.rand(256, 256), os.getppid()\nwhile os.getppid() == parent: a @ a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--slowdown", type=float, default=0.2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--idle", action="store_true", help="do not start the busy process")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = timm.create_model("deit_tiny_patch16_224", img_size=options.size).eval()
    images = torch.randn(1, 3, options.size, options.size)

    def forward() -> None:
        with torch.inference_mode():
            model(images)

    print(stamp_line(stamp()), f"· load average at the start: {os.getloadavg()[0]:.0f}", flush=True)
    slower = slowed(forward, options.slowdown)
    with contextlib.nullcontext() if options.idle else busy_core():
        for name, variant in ("equal", forward), (f"slowed by {options.slowdown:.0%}", slower):
            called = 0
            for seed in range(options.repeats):
                found = trial(forward, variant, seed)
                called += found.distinguishable
                low, high = found.quartiles
                print(f"  {found.ratio:.3f} (IQR {low:.3f}–{high:.3f}, {found.pairs} pairs)", flush=True)
            print(f"{name}: distinguishable in {called} of {options.repeats}", flush=True)


def trial(reference: Callable[[], None], variant: Callable[[], None], seed: int) -> Comparison:
    return interleave({"reference": reference, "variant": variant}, seed=seed).compare("variant", "reference")


def slowed(call: Callable[[], None], by: float) -> Callable[[], None]:
    """`call` followed by a busy wait of the fraction `by` of its own duration."""

    def longer() -> None:
        start = time.perf_counter()
        call()
        end = start + (1 + by) * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass

    return longer


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY], env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
