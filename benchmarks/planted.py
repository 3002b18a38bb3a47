"""Is the clock's verdict to be trusted? Plant a slowdown, then none, and count what it says.

    python benchmarks/planted.py [--repeats 20] [--slowdown 0.2] [--size 224] [--threads 1] [--idle]

A DeiT-Tiny forward races itself, once with a planted slowdown and once without, while another process keeps one core
busy (unless `--idle`). Expected: the slowdown is called distinguishable in at least 19 of 20 repeats, the equal pair in
at most 1 of 20.
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

# It ends with whoever started it, even if that is killed.
BUSY = "import os, numpy as np\na, parent = np.random.rand(256, 256), os.getppid()\nwhile os.getppid() == parent: a @ a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--slowdown", type=float, default=0.2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--idle", action="store_true", help="without the other process")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = timm.create_model("deit_tiny_patch16_224", img_size=options.size).eval()
    images = torch.randn(1, 3, options.size, options.size)

    def forward() -> None:
        with torch.inference_mode():
            model(images)

    print(stamp_line(stamp()), f"· {os.getloadavg()[0]:.0f} processes were waiting or running before", flush=True)
    slower = slowed(forward, options.slowdown)
    with contextlib.nullcontext() if options.idle else busy_core():
        for name, contestant in ("equal", forward), (f"slowed by {options.slowdown:.0%}", slower):
            told = 0
            for seed in range(options.repeats):
                found = trial(forward, contestant, seed)
                told += found.distinguishable
                low, high = found.quartiles
                print(f"  {found.ratio:.3f} (IQR {low:.3f}–{high:.3f}, {found.pairs} pairs)", flush=True)
            print(f"{name}: called distinguishable in {told} of {options.repeats}", flush=True)


def trial(reference: Callable[[], None], contestant: Callable[[], None], seed: int) -> Comparison:
    return interleave({"reference": reference, "contestant": contestant}, seed=seed).compare("contestant", "reference")


def slowed(call: Callable[[], None], by: float) -> Callable[[], None]:
    """The same call taking `by` longer: it spins on in proportion to what it has just taken."""

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
