"""Functions that several benchmarks share: a results file, training data, accuracy, interleaved benchmarks, tables.

Results are written row by row, so an interrupted benchmark resumes when the same command is run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    """The training run, if it has finished; otherwise exit, because an interrupted run must not be evaluated."""
    if not run.finished:
        raise SystemExit(f"interrupted; the same command resumes {run.out}")
    return run


def gathered(out: Path, distil: str, more: Sequence[str]) -> str:
    """Make a folder of links to training images; return its path, or `distil` itself if `more` is empty.

    distil: folder of images, optionally `FOLDER:TIMES`. Every tenth image becomes a validation image.
    more: further folders, as `FOLDER:TIMES`. TIMES 3 links each image three times, 0.5 every second image."""
    if not more:
        return distil
    own, others = distil.partition(":"), [one.rpartition(":") for one in more]
    images, times = _images(own[0]), float(own[2] or 1)
    held = set(range(5, len(images), 10))
    _link(out / "val", [images[i] for i in sorted(held)], "0")
    _link(out / "train", _often([one for i, one in enumerate(images) if i not in held], times), "0")
    for number, (folder, _, times) in enumerate(others, start=1):
        _link(out / "train", _often(_images(folder), float(times)), str(number))
    return str(out)


def _images(folder: str) -> list[Path]:
    return sorted(file for file in Path(folder).resolve().rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))


def _often(images: list[Path], times: float) -> list[Path]:
    return images * round(times) if times >= 1 else images[:: round(1 / times)]


def _link(split: Path, images: list[Path], prefix: str) -> None:
    folder = split / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        link = folder / f"{prefix}-{i}{image.suffix}"
        if not link.is_symlink():
            link.symlink_to(image)


class Rows(dict[str, Any]):
    """The results of a benchmark by name, stored in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(json.loads(path.read_text()) if path.is_file() else {})

    def keep(self, found: Mapping[str, Any]) -> None:
        """Add rows and a stamp of this machine, and write the file."""
        self.update(found, stamp=stamp())
        with atomic(self.path) as temporary:
            temporary.write_text(json.dumps(self, indent=1))


def accuracies(
    original: Any, models: Mapping[str, Any], source: Any, size: int, limit: int | None = None
) -> dict[str, Any]:
    """Top-1 accuracy of each model, paired with the original model on the same images, and multiply-accumulates.

    Images are cropped at 224 px only, the size of the model's training."""
    transform = preprocessing(original, (size, size), None if size == 224 else 1.0)
    found = evaluate(original, models, source, transform, limit=limit, workers=0)
    macs = {name: count(model, size) for name, model in models.items()}
    return {n: vars(one) | {"core": macs[n].core, "total": macs[n].total} for n, one in found.items()}


@torch.inference_mode()
def speedups(original: Any, models: Mapping[str, Any], size: int, batch: int, budget: float) -> dict[str, Any]:
    """Interleaved benchmark of all models: speed-up over the original (median of paired ratios), quartiles, latency."""
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    calls = {name: (lambda model=model: model(x)) for name, model in {"dense": original, **models}.items()}
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


def by_machine(found: Mapping[str, Any], section: Callable[[Any], str]) -> str:
    """The sections of a results file that has one entry for each kind of machine."""
    return "\n\n".join(section(found[machine]) for machine in sorted(found))


def against(row: Mapping[str, Any]) -> str:
    """The accuracy change against the original model, with its 95 % interval: `−0.6 (−1.8 to +0.6)`."""
    low, high = row["difference_ci"]
    return f"{signed(row['difference'])} ({signed(low)} to {signed(high)})"


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def speed(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    low, high = row["quartiles"]
    return f"{row['speedup']:.2f}× ({low:.2f}–{high:.2f})"
