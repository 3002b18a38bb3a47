"""What contestants cost: multiply-accumulates, milliseconds and memory, at the size trained and at larger ones.

Cost does not depend on the seed, so it is measured once for each contestant, when nothing else runs, and kept in its
`cost.json`. Those of a setting interleave together, by turns, against the dense model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attendless.errors import UserError
from attendless.measure.bench import bench_all
from attendless.measure.subject import described, original, resized
from attendless.sizes import input_size
from attendless.storage import atomic

from . import build
from .contestants import Contestant
from .schedule import accelerator

#: How much larger than the images trained on those are that cost is also measured at.
FACTORS = (1, 3, 6)
#: Seconds of timing for each contestant and size.
BUDGET = 2.0
#: What a point of the cost curve keeps of a measurement.
_POINT = (
    *("size", "tokens", "macs", "latency_ms", "dense_latency_ms", "speedup", "spread"),
    *("quartiles", "pairs", "distinguishable"),
)


def measure(
    contestants: Sequence[Contestant],
    out: Path,
    classes: int,
    *,
    device: str = "auto",
    threads: int = 1,
    jobs: int = 1,
    factors: Sequence[int] = FACTORS,
    budget: float = BUDGET,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure the contestants of one setting and write each one's `cost.json`."""
    place = accelerator(device)
    models = [build.build(contestant, classes).to(place).eval() for contestant in contestants]
    dense = reference(models[0], contestants[0], classes).to(place)
    height, width = input_size(dense)
    rows: list[dict[str, Any]] = []
    points: list[list[dict[str, Any]]] = [[] for _ in models]
    stamps: list[dict[str, Any]] = [{} for _ in models]
    for factor in dict.fromkeys((1, *factors)):
        size = (height * factor, width * factor)
        sized, base = ([*models], dense) if factor == 1 else ([resized(m, size) for m in models], resized(dense, size))
        say(f"memory of {len(models)} attentions at {size[0]}x{size[1]} px")
        memories = peaks([*sized, base], size, threads=threads, jobs=jobs)
        say(f"timing {len(models)} attentions at {size[0]}x{size[1]} px, by turns")
        found = bench_all(
            sized,
            base,
            size=size,
            name=contestants[0].setting.model,
            threads=threads,
            budget=budget,
            memory=False,
            throughput=factor == 1,
            parts=False,
        )
        for i, row in enumerate(found):
            measured = {"peak_memory_mb": memories[i], "dense_peak_memory_mb": memories[-1]}
            memory = {name: None if isinstance(value, str) else value for name, value in measured.items()}
            points[i].append({name: row.as_dict()[name] for name in _POINT} | memory)
            if factor == 1:
                why = [value for value in measured.values() if isinstance(value, str)]
                rows.append(row.as_dict() | memory | {"notes": [*row.notes, *why]})
                stamps[i] = dict(row.stamp)
    for i, contestant in enumerate(contestants):
        payload = {"stamp": stamps[i], "row": rows[i], "curve": points[i]}
        with atomic(out / contestant.folder / "cost.json") as temporary:
            temporary.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n")


def reference(model: Any, contestant: Contestant, classes: int) -> Any:
    """The dense model: timm's own with its fused attention, or the backbone with full attention where timm has none."""
    try:
        return original(model)
    except UserError:
        return build.dense(contestant.setting, classes).eval()


def peaks(models: Sequence[Any], size: tuple[int, int], *, threads: int, jobs: int) -> list[float | str]:
    """Peak memory of each model's forward, or why there is none. Neighbours do not change it, so several are measured
    at a time."""

    def peak(model: Any) -> float | str:
        try:
            return described(model).memory(size, batch=1, threads=threads).peak
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(peak, models))


def measured(folder: Path) -> dict[str, Any] | None:
    """What was measured of the contestant in `folder` before, if anything."""
    try:
        found = json.loads((folder / "cost.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"stamp", "row", "curve"} <= found.keys() else None
