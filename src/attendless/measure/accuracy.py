"""Accuracy of models and their top-1 agreement with the baseline, in one pass over the same images."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ..data.labels import Labels, match_labels
from ..data.preprocessing import evaluation_transform
from ..data.source import IGNORE, BadImage, Source
from ..errors import UserError

#: Standard normal quantile of a 95 % interval.
Z = 1.959964


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """One variant on one set of images. Percentages are of the images that could be read and are labelled.

    `difference` is its top-1 minus the baseline's on the same images, in percentage points, with its own 95 % interval,
    which is narrower than those of the two accuracies because the images are paired.
    """

    images: int
    skipped: int
    top1: float | None
    top5: float | None
    top1_ci: tuple[float, float] | None
    agreement: float
    difference: float | None
    difference_ci: tuple[float, float] | None
    throughput: float


@dataclasses.dataclass
class _Tally:
    """Per-image outcomes of one variant."""

    right: list[bool] = dataclasses.field(default_factory=list)
    right5: list[bool] = dataclasses.field(default_factory=list)
    answers: list[int] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def preprocessing(model: nn.Module, size: tuple[int, int], crop_pct: float | None = None) -> Callable[[Any], Tensor]:
    """timm's evaluation transform for the model, at another size or crop if asked."""
    config = resolve_model_data_config(model)
    config["input_size"] = (config["input_size"][0], *size)
    if crop_pct is not None:
        config["crop_pct"] = crop_pct
    return evaluation_transform(config)


def evaluate(
    baseline: nn.Module,
    variants: Mapping[str, nn.Module],
    source: Source,
    transform: Callable[[Any], Tensor],
    *,
    labels: Labels | None = None,
    limit: int | None = None,
    batch: int = 32,
    workers: int = 1,
    progress: Callable[[int], None] = lambda done: None,
    on_skip: Callable[[str], None] = lambda reason: None,
) -> dict[str, Accuracy]:
    """Run the baseline and every variant over the images; unreadable images are skipped, counted and reported.

    A variant that is the baseline itself is not run twice. `labels` says which class of the model each class of the set
    is (default: as `match_labels` finds). `limit` takes that many images, spread evenly over the set. NaN in an output
    raises, because NaN would agree with NaN.
    """
    classes = (match_labels(source.classes, baseline) if labels is None else labels).classes
    truth: list[int] = []
    tallies = {name: _Tally() for name in variants}
    reference, skipped = _Tally(), 0
    device = next(baseline.parameters()).device
    for images, given, names, reasons in batches(Pictures(source, transform, limit), batch, workers):
        skipped += len(reasons)
        for reason in reasons:
            on_skip(reason)
        if len(given):
            wanted = [classes[label] if classes else IGNORE for label in given]
            truth += wanted
            images = images.to(device)
            _answer("the baseline", baseline, images, wanted, names, reference)
            for name, model in variants.items():
                if model is not baseline:
                    _answer(name, model, images, wanted, names, tallies[name])
        progress(len(given) + len(reasons))
    if not truth:
        raise UserError(f"none of the {len(source)} images could be read")
    found = {n: reference if variants[n] is baseline else tally for n, tally in tallies.items()}
    return {name: _summary(tally, reference, skipped, bool(classes)) for name, tally in found.items()}


def load_images(source: Source, transform: Callable[[Any], Tensor], limit: int) -> Tensor:
    """Up to `limit` preprocessed images spread over the set [n, 3, H, W]; unreadable ones are left out."""
    return load_labelled(source, transform, limit)[0]


def load_labelled(source: Source, transform: Callable[[Any], Tensor], limit: int) -> tuple[Tensor, list[int]]:
    """As `load_images`, with the label of every image."""
    found = Pictures(source, transform, limit)
    read = [(item[0], item[1]) for item in map(found.__getitem__, range(len(found))) if item[0] is not None]
    if not read:
        raise UserError(f"none of the {len(found)} images could be read")
    return torch.stack([image for image, _ in read if image is not None]), [label for _, label in read]


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson's score interval), as fractions."""
    p, n = successes / trials, trials
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> tuple[float, tuple[float, float]]:
    """Difference of two proportions over the same images and its 95 % interval: only images that flip count."""
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    n = len(ours)
    difference = (gained - lost) / n
    half = Z * math.sqrt(max(gained + lost - (gained - lost) ** 2 / n, 0)) / n
    return difference, (difference - half, difference + half)


def spread(count: int, limit: int | None) -> list[int]:
    """Which of `count` images are taken where `limit` asks for fewer: as evenly spread as can be."""
    taken = min(limit or count, count)
    return [i * count // taken for i in range(taken)]


#: An image, or None; its label; its name; and why it could not be read, or nothing.
_Item = tuple[Tensor | None, int, str, str]


class Pictures(torch.utils.data.Dataset[_Item]):
    """The preprocessed images of a set, or `limit` of them, spread evenly."""

    def __init__(self, source: Source, transform: Callable[[Any], Tensor], limit: int | None) -> None:
        self.indices = spread(len(source), limit)
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> _Item:
        name = self.source.name(self.indices[index])
        try:
            picture, label = self.source[self.indices[index]]
            return self.transform(picture), label, name, ""
        except BadImage as error:
            return None, IGNORE, name, str(error)


_Batch = tuple[Tensor, list[int], list[str], list[str]]


def _collate(items: list[_Item]) -> _Batch:
    sound = [(image, label, name) for image, label, name, _ in items if image is not None]
    images = torch.stack([image for image, _, _ in sound]) if sound else torch.empty(0)
    reasons = [reason for *_, reason in items if reason]
    return images, [label for _, label, _ in sound], [name for *_, name in sound], reasons


def batches(pictures: Pictures, batch: int, workers: int) -> Iterator[_Batch]:
    """Images, labels and names of each batch, and why others of it could not be read."""
    workers = 0 if len(pictures) <= batch else workers
    yield from torch.utils.data.DataLoader(pictures, batch_size=batch, num_workers=workers, collate_fn=_collate)


def _answer(
    who: str, model: nn.Module, images: Tensor, wanted: Sequence[int], names: Sequence[str], tally: _Tally
) -> None:
    start = time.perf_counter()
    with torch.inference_mode():
        logits = model(images).float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices.tolist()
    tally.seconds += time.perf_counter() - start
    sound = logits.isfinite().all(1).tolist()
    if not all(sound):
        raise UserError(
            f"{who} answers image {names[sound.index(False)]!r} with NaN or infinity, so there is nothing to measure"
        )
    for ranking, label in zip(best, wanted, strict=True):
        tally.answers.append(ranking[0])
        tally.right.append(ranking[0] == label)
        tally.right5.append(label in ranking)


def _summary(tally: _Tally, baseline: _Tally, skipped: int, labelled: bool) -> Accuracy:
    n = len(tally.answers)
    agreement = sum(a == b for a, b in zip(tally.answers, baseline.answers, strict=True)) / n
    difference, interval = paired_difference(tally.right, baseline.right)
    low, high = wilson(sum(tally.right), n)
    return Accuracy(
        images=n,
        skipped=skipped,
        top1=100 * sum(tally.right) / n if labelled else None,
        top5=100 * sum(tally.right5) / n if labelled else None,
        top1_ci=(100 * low, 100 * high) if labelled else None,
        agreement=agreement,
        difference=100 * difference if labelled else None,
        difference_ci=(100 * interval[0], 100 * interval[1]) if labelled else None,
        throughput=n / tally.seconds,
    )
