"""Scores of models by a user's metric, in one pass over the same images."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.source import Source
from ..errors import UserError
from .accuracy import Pictures, Z, batches

#: (outputs, targets) → a score per image [n], higher is better. Targets are the labels, or the original's outputs.
Metric = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Scores:
    """One variant on one set of images.

    mean_ci: 95 % interval of the mean.
    worst, worst_image: the lowest score, and the name of its image.
    difference: mean of the score minus the original's on the same images, with its 95 % interval.
    """

    images: int
    skipped: int
    mean: float
    mean_ci: tuple[float, float]
    median: float
    worst: float
    worst_image: str
    difference: float
    difference_ci: tuple[float, float]
    throughput: float


def evaluate_by(
    metric: Metric,
    baseline: nn.Module,
    variants: Mapping[str, nn.Module],
    source: Source,
    transform: Callable[[Any], Tensor],
    *,
    classes: Sequence[int] | None = None,
    limit: int | None = None,
    batch: int = 1,
    workers: int = 1,
    progress: Callable[[int], None] = lambda done: None,
    on_skip: Callable[[str], None] = lambda reason: None,
) -> dict[str, Scores]:
    """Run the baseline and every variant over the images and score their outputs.

    Args:
        metric: (outputs, targets) → a score per image, higher is better.
        baseline: the original model.
        variants: models by name; one that is the baseline itself is not run twice.
        source: the images; unreadable ones are skipped, counted and reported by `on_skip`.
        transform: the preprocessing of an image.
        classes: the model's class of each class of the set: the metric receives labels as targets. Default: it receives
            the baseline's outputs.
        limit: number of images, spread evenly over the set; default: all.
        batch: images per forward pass.
        workers: processes that decode images.
        progress: receives the number of images of each batch.

    Raises:
        UserError: no image can be read, an output is not finite, or the metric does not return a score per image.
    """
    scores: dict[str, list[float]] = {name: [] for name in variants}
    seconds, before, seen, skipped = dict.fromkeys(variants, 0.0), list[float](), list[str](), 0
    for images, given, names, reasons in batches(Pictures(source, transform, limit), batch, workers):
        skipped += len(reasons)
        for reason in reasons:
            on_skip(reason)
        if names:
            seen += names
            original, took = _outputs("the baseline", baseline, images, names)
            targets = original if classes is None else torch.tensor([classes[label] for label in given])
            before += scored(metric, original, targets)
            for name, model in variants.items():
                outputs = original
                if model is not baseline:
                    outputs, took = _outputs(name, model, images, names)
                seconds[name] += took
                scores[name] += before[-len(names) :] if model is baseline else scored(metric, outputs, targets)
        progress(len(names) + len(reasons))
    if not seen:
        raise UserError(f"none of the {len(source)} images could be read")
    return {name: _summary(scores[name], before, seen, skipped, seconds[name]) for name in variants}


@torch.inference_mode()
def _outputs(who: str, model: nn.Module, images: Tensor, names: Sequence[str]) -> tuple[Tensor, float]:
    began = time.perf_counter()
    found = model(images)
    took = time.perf_counter() - began
    if not isinstance(found, Tensor):
        raise UserError(f"{who} returns {type(found).__name__}: a metric receives one tensor, with one row per image")
    sound = found.flatten(1).isfinite().all(1).tolist()
    if not all(sound):
        raise UserError(f"{who} returns NaN or infinity for image {names[sound.index(False)]!r}")
    return found.float(), took


def scored(metric: Metric, outputs: Tensor, targets: Tensor) -> list[float]:
    """The metric's score of every image, checked: one finite number each."""
    found = torch.as_tensor(metric(outputs, targets), dtype=torch.float64).flatten()
    if len(found) != len(outputs) or not bool(found.isfinite().all()):
        raise UserError(
            f"the metric returned {len(found)} values for {len(outputs)} images: expected one finite score each"
        )
    return [float(score) for score in found]


def _summary(
    scores: Sequence[float], before: Sequence[float], names: Sequence[str], skipped: int, seconds: float
) -> Scores:
    mean, ends = _mean(scores)
    difference, around = _mean([a - b for a, b in zip(scores, before, strict=True)])
    worst = min(range(len(scores)), key=scores.__getitem__)
    return Scores(
        images=len(scores),
        skipped=skipped,
        mean=mean,
        mean_ci=ends,
        median=statistics.median(scores),
        worst=scores[worst],
        worst_image=names[worst],
        difference=difference,
        difference_ci=around,
        throughput=len(scores) / seconds,
    )


def _mean(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The mean and its 95 % interval by the normal distribution."""
    mean = statistics.fmean(values)
    half = Z * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean, (mean - half, mean + half)
