"""The cost of variants: multiply-accumulates, latency and memory, at the training size and at larger ones.

Cost does not depend on the seed, so it is measured once per variant, when nothing else runs, and stored in its
`cost.json`. The variants of a setting share one interleaved benchmark with the original model.
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
from .schedule import accelerator
from .variants import Variant

#: Cost is measured at these multiples of the training size.
FACTORS = (1, 3, 6)
#: Seconds of timing for each variant and size.
BUDGET = 2.0
#: The fields of a measurement that a point of the cost curve stores.
_POINT = (
    *("size", "tokens", "macs", "latency_ms", "dense_latency_ms", "speedup", "spread"),
    *("quartiles", "pairs", "distinguishable"),
)


def measure(
    variants: Sequence[Variant],
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
    """Measure the variants of one setting and write each one's `cost.json`."""
    place = accelerator(device)
    models = [build.build(variant, classes).to(place).eval() for variant in variants]
    dense = reference(models[0], variants[0], classes).to(place)
    height, width = input_size(dense)
    rows: list[dict[str, Any]] = []
    points: list[list[dict[str, Any]]] = [[] for _ in models]
    stamps: list[dict[str, Any]] = [{} for _ in models]
    for factor in dict.fromkeys((1, *factors)):
        size = (height * factor, width * factor)
        sized, base = ([*models], dense) if factor == 1 else ([resized(m, size) for m in models], resized(dense, size))
        say(f"memory of {len(models)} attentions at {size[0]}x{size[1]} px")
        memories = peaks([*sized, base], size, threads=threads, jobs=jobs)
        say(f"timing {len(models)} attentions at {size[0]}x{size[1]} px, interleaved")
        found = bench_all(
            sized,
            base,
            size=size,
            name=variants[0].setting.model,
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
    for i, variant in enumerate(variants):
        payload = {"stamp": stamps[i], "row": rows[i], "curve": points[i]}
        with atomic(out / variant.folder / "cost.json") as temporary:
            temporary.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n")


def reference(model: Any, variant: Variant, classes: int) -> Any:
    """The baseline: timm's model with its fused attention, or the backbone with full attention where timm has none."""
    try:
        return original(model)
    except UserError:
        return build.dense(variant.setting, classes).eval()


def peaks(models: Sequence[Any], size: tuple[int, int], *, threads: int, jobs: int) -> list[float | str]:
    """Peak memory of each model's forward pass, or the reason why there is none. Parallel processes do not change it,
    so several are measured at once."""

    def peak(model: Any) -> float | str:
        try:
            return described(model).memory(size, batch=1, threads=threads).peak
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(peak, models))


def measured(folder: Path) -> dict[str, Any] | None:
    """The stored measurements of the variant in `folder`, if any."""
    try:
        found = json.loads((folder / "cost.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"stamp", "row", "curve"} <= found.keys() else None
