"""How does foveal attention at batch 1 scale to 16 and 64 cores? Measured parts, simulated workers.

    python benchmarks/many_cores.py [--sides 24 64] [--workers 1 2 16 64] [--out FILE]

`many_cores.cpp` times every part of one head's work on one thread, divided as for each number of threads. The
simulation hands the parts to workers as native/schedule.hpp does and reports when the last one is done. "One thread
prepares a head" divides the work as versions up to 0.2.0 did. Memory bandwidth, the start of threads and busy cores are
not simulated, so the speed-ups are upper bounds.
"""

from __future__ import annotations

import argparse
import heapq
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from quoting import quote
from study import Rows, table

from attendless.sparse import foveal
from attendless.stamp import stamp_line

ROOT = Path(__file__).resolve().parents[1]
HEADS = 3
#: As native/CMakeLists.txt compiles the kernels for AVX2.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-mavx2", "-mfma"]
FLAGS += ["-Wno-psabi", "-Wno-ignored-attributes", "-DATTENDLESS_ISA=many_cores", "-DATTENDLESS_WIDTH=8"]

#: The milliseconds of the parts of each step of one head.
Steps = list[list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[24, 64], help="patches per side of a square image")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 16, 64])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "many-cores.json")
    args = parser.parse_args()
    rows = Rows(args.out)
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        for side in args.sides:
            for workers in args.workers:
                rows.keep({f"{side} {workers}": measured(program, side, workers)})
    quote(ROOT / "docs" / "writing-a-kernel.md", "many-cores", block(rows))


def compiled(folder: Path) -> Path:
    """The program that times parts."""
    native, program = ROOT / "native", folder / "many_cores"
    sources = [ROOT / "benchmarks" / "many_cores.cpp", native / "geometry.cpp", native / "memory.cpp"]
    subprocess.run(["c++", *FLAGS, f"-I{native}", *sources, "-o", program], check=True)
    return program


def measured(program: Path, side: int, workers: int) -> Steps:
    sizes = foveal.layout(side, side, 1, keep=0.1).sizes
    command = [str(program), str(workers), str(HEADS), *map(str, sizes)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [[float(x) for x in line.split()] for line in lines]


def undivided(steps: Steps) -> Steps:
    """One part for all that prepares a head."""
    return [[sum(map(sum, steps[:-1]))], steps[-1]]


def finish(steps: Sequence[Sequence[float]], heads: int, workers: int) -> float:
    """When `workers` have done every part of `heads` heads.

    A worker takes a head that nobody has, and its parts; then parts of the heads that others have. A step begins when
    the one before it is done.
    """
    steps = [step for step in steps if step]
    waiting: list[deque[float]] = [deque() for _ in range(heads)]  # the parts of each head's step nobody has taken
    running, step = [0] * heads, [0] * heads
    unopened = deque(range(heads))
    mine = [-1] * workers
    idle, now = list(range(workers)), 0.0
    events: list[tuple[float, int, int]] = []  # when a worker is done with a part of a head

    def part(worker: int) -> int:
        """The head that a worker takes its next part from; −1: there is none now."""
        if mine[worker] >= 0 and waiting[mine[worker]]:
            return mine[worker]
        if unopened and (mine[worker] < 0 or step[mine[worker]] == len(steps)):
            mine[worker] = unopened.popleft()
            waiting[mine[worker]].extend(steps[0])
            return mine[worker]
        return next((head for head in range(heads) if waiting[head]), -1)

    while True:
        for worker in list(idle):
            if (head := part(worker)) >= 0:
                idle.remove(worker)
                running[head] += 1
                heapq.heappush(events, (now + waiting[head].popleft(), worker, head))
        if not events:
            return now
        now, worker, head = heapq.heappop(events)
        idle.append(worker)
        running[head] -= 1
        if not running[head] and not waiting[head]:
            step[head] += 1
            if step[head] < len(steps):
                waiting[head].extend(steps[step[head]])


def block(found: dict[str, object]) -> str:
    """The table of docs/writing-a-kernel.md."""
    lines = []
    sides = sorted({int(key.split()[0]) for key in found if key != "stamp"})
    for side in sides:
        alone: Steps = found[f"{side} 1"]  # type: ignore[assignment]
        base = HEADS * sum(map(sum, alone))
        for workers in sorted(int(key.split()[1]) for key in found if key.startswith(f"{side} ")):
            steps: Steps = found[f"{side} {workers}"]  # type: ignore[assignment]
            times = [finish(undivided(alone), HEADS, workers), finish(steps, HEADS, workers)]
            cells = [cell for ms in times for cell in (f"{ms:.2f}", f"{base / ms:.1f}×")]
            lines.append([f"{side * side + 1:,}", str(workers), *cells])
    columns = ["tokens", "cores", "one thread prepares a head, ms", "speed-up", "shared, ms", "speed-up"]
    return f"{table(columns, lines)}\n\n{stamp_line(found['stamp'])}"  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
