"""What the studies in this folder share: results in a file that grows row by row, accuracies, races, and Markdown.

A study killed and started again goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attendless.measure.accuracy import evaluate, preprocessing
from attendless.measure.clock import interleave
from attendless.measure.macs import count
from attendless.stamp import stamp
from attendless.storage import atomic

MODEL = "deit_tiny_patch16_224"


def whole(run: Any) -> Any:
    """A training run's result, or the end of the study: one that was asked to stop is not to be judged."""
    if not run.finished:
        raise SystemExit(f"stopped; the same command goes on with {run.out}")
    return run


def gathered(out: Path, distil: str, more: Sequence[str]) -> str:
    """A folder of links to pictures to learn from: those of `distil`, and of each `FOLDER:TIMES` in `more` (3: all of
    them, three times; 0.5: every second). Every tenth of `distil` is held out, as where there are no others."""
    if not more:
        return distil
    own, others = distil.partition(":"), [one.rpartition(":") for one in more]
    pictures, times = _pictures(own[0]), float(own[2] or 1)
    held = set(range(5, len(pictures), 10))
    _link(out / "val", [pictures[i] for i in sorted(held)], "0")
    _link(out / "train", _often([one for i, one in enumerate(pictures) if i not in held], times), "0")
    for number, (folder, _, times) in enumerate(others, start=1):
        _link(out / "train", _often(_pictures(folder), float(times)), str(number))
    return str(out)


def _pictures(folder: str) -> list[Path]:
    return sorted(file for file in Path(folder).resolve().rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))


def _often(pictures: list[Path], times: float) -> list[Path]:
    return pictures * round(times) if times >= 1 else pictures[:: round(1 / times)]


def _link(split: Path, pictures: list[Path], prefix: str) -> None:
    folder = split / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for i, picture in enumerate(pictures):
        link = folder / f"{prefix}-{i}{picture.suffix}"
        if not link.is_symlink():
            link.symlink_to(picture)


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
    timings = interleave(calls, budget=budget * len(calls))
    compared = {name: timings.compare(name, "dense") for name in models}
    ms = {name: 1e3 * timings.median(name) for name in calls}
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
