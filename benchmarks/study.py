"""What the studies in this folder share: results in a file that grows row by row, accuracies, races, and Markdown.

A study killed and started again goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attendless.measure.accuracy import evaluate, preprocessing
from attendless.measure.clock import race
from attendless.measure.macs import count
from attendless.stamp import stamp
from attendless.storage import atomic

MODEL = "deit_tiny_patch16_224"


def whole(run: Any) -> Any:
    """A training run's result, or the end of the study: one that was asked to stop is not to be judged."""
    if not run.finished:
        raise SystemExit(f"stopped; the same command goes on with {run.out}")
    return run


class Rows(dict[str, Any]):
    """A study's results by name, kept in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(json.loads(path.read_text()) if path.is_file() else {})

    def keep(self, found: Mapping[str, Any]) -> None:
        """Add rows, and the machine they were found on."""
        self.update(found, stamp=stamp())
        with atomic(self.path) as temporary:
            temporary.write_text(json.dumps(self, indent=1))


def accuracies(
    dense: Any, models: Mapping[str, Any], source: Any, size: int, limit: int | None = None
) -> dict[str, Any]:
    """Top-1 of each model, paired with the dense model's answers, and its multiply-accumulates. Larger images than the
    model was trained for are not cropped."""
    transform = preprocessing(dense, (size, size), None if size == 224 else 1.0)
    found = evaluate(dense, models, source, transform, limit=limit, workers=0)
    macs = {name: count(model, size) for name, model in models.items()}
    return {n: vars(one) | {"core": macs[n].core, "total": macs[n].total} for n, one in found.items()}


@torch.inference_mode()
def speedups(dense: Any, models: Mapping[str, Any], size: int, batch: int, budget: float) -> dict[str, Any]:
    """Every model against the dense one, all by turns: median of paired ratios, quartiles, milliseconds."""
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    calls = {name: (lambda model=model: model(x)) for name, model in {"dense": dense, **models}.items()}
    raced = race(calls, budget=budget * len(calls))
    compared = {name: raced.compare(name, "dense") for name in models}
    ms = {name: 1e3 * raced.median(name) for name in calls}
    return {
        name: {"speedup": c.ratio, "quartiles": list(c.quartiles), "ms": ms[name], "dense_ms": ms["dense"]}
        for name, c in compared.items()
    }


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def against(row: Mapping[str, Any]) -> str:
    """How far from the dense model's accuracy: `−0.6 (−1.8 to +0.6)`."""
    low, high = row["difference_ci"]
    return f"{signed(row['difference'])} ({signed(low)} to {signed(high)})"


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def speed(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    low, high = row["quartiles"]
    return f"{row['speedup']:.2f}× ({low:.2f}–{high:.2f})"
