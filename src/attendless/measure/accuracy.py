"""How often models are right, and how often they answer as the dense model does, in one pass over the same images."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from torch import Tensor, nn

from ..data.source import IGNORE, BadImage, Source
from ..errors import UserError

#: Standard normal quantile of a 95 % interval.
Z = 1.959964


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """One contestant on one set of images. Percentages are of the images that could be read and are labelled.

    `difference` is its top-1 minus the dense model's on the very same images, in points, with its own 95 % interval:
    two models may each be uncertain by three points and their difference certain to half a point.
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
    """Per-image outcomes of one contestant."""

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
    return create_transform(**config, is_training=False)


def evaluate(
    dense: nn.Module,
    contestants: Mapping[str, nn.Module],
    source: Source,
    transform: Callable[[Any], Tensor],
    *,
    limit: int | None = None,
    batch: int = 32,
    workers: int = 1,
    progress: Callable[[int], None] = lambda done: None,
    on_skip: Callable[[str], None] = lambda reason: None,
) -> dict[str, Accuracy]:
    """Run the dense model and every contestant over the images; unreadable ones are skipped, counted and told.

    A contestant that is the dense model itself is not run twice. `limit` takes that many images, spread over the set.
    """
    labels = label_map(source, _classes(dense))
    truth: list[int] = []
    tallies = {name: _Tally() for name in contestants}
    reference, skipped = _Tally(), 0
    device = next(dense.parameters()).device
    for images, given, reasons in _batches(_Pictures(source, transform, limit), batch, workers):
        skipped += len(reasons)
        for reason in reasons:
            on_skip(reason)
        if len(given):
            wanted = [labels[label] if labels else IGNORE for label in given]
            truth += wanted
            images = images.to(device)
            _answer(dense, images, wanted, reference)
            for name, model in contestants.items():
                if model is not dense:
                    _answer(model, images, wanted, tallies[name])
        progress(len(given) + len(reasons))
    if not truth:
        raise UserError(f"none of the {len(source)} images could be read")
    found = {n: reference if contestants[n] is dense else tally for n, tally in tallies.items()}
    return {name: _summary(tally, reference, skipped, bool(labels)) for name, tally in found.items()}


def load_images(source: Source, transform: Callable[[Any], Tensor], limit: int) -> Tensor:
    """Up to `limit` preprocessed images spread over the set [n, 3, H, W]; unreadable ones are left out."""
    pictures = _Pictures(source, transform, limit)
    images = [image for image, _, _ in map(pictures.__getitem__, range(len(pictures))) if image is not None]
    if not images:
        raise UserError(f"none of the {len(pictures)} images could be read")
    return torch.stack(images)


def label_map(source: Source, classes: int) -> list[int]:
    """Folder label → the model's class; empty where the images are unlabelled.

    ImageNet's folder names (n01440764…) are looked up, so that a subset such as Imagenette can be scored too;
    otherwise there must be as many classes as the model has.
    """
    names = list(source.classes)
    if not names:
        return []
    if classes == 1000 and all(name[:1] == "n" and name[1:].isdigit() and len(name) == 9 for name in names):
        index = {name: i for i, name in enumerate(ImageNetInfo().label_names())}
        missing = [name for name in names if name not in index]
        if missing:
            raise UserError(f"folders {', '.join(missing[:3])} are not classes of ImageNet-1k")
        return [index[name] for name in names]
    if len(names) != classes:
        raise UserError(
            f"the images have {len(names)} classes and the model {classes}: expected as many folders, folders named by "
            "class index, or ImageNet's folder names"
        )
    return list(range(classes))


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


class _Pictures(torch.utils.data.Dataset):
    """Each image as (tensor, label, ""), or (None, label, why not)."""

    def __init__(self, source: Source, transform: Callable[[Any], Tensor], limit: int | None) -> None:
        count = min(limit or len(source), len(source))
        self.indices = [i * len(source) // count for i in range(count)]
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor | None, int, str]:
        try:
            picture, label = self.source[self.indices[index]]
            return self.transform(picture), label, ""
        except BadImage as error:
            return None, IGNORE, str(error)


def _collate(items: list[tuple[Tensor | None, int, str]]) -> tuple[Tensor, list[int], list[str]]:
    sound = [(image, label) for image, label, _ in items if image is not None]
    images = torch.stack([image for image, _ in sound]) if sound else torch.empty(0)
    return images, [label for _, label in sound], [reason for _, _, reason in items if reason]


def _batches(pictures: _Pictures, batch: int, workers: int) -> Iterator[tuple[Tensor, list[int], list[str]]]:
    workers = 0 if len(pictures) <= batch else workers
    yield from torch.utils.data.DataLoader(pictures, batch_size=batch, num_workers=workers, collate_fn=_collate)


def _answer(model: nn.Module, images: Tensor, wanted: Sequence[int], tally: _Tally) -> None:
    start = time.perf_counter()
    with torch.inference_mode():
        logits = model(images).float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices.tolist()
    tally.seconds += time.perf_counter() - start
    for ranking, label in zip(best, wanted, strict=True):
        tally.answers.append(ranking[0])
        tally.right.append(ranking[0] == label)
        tally.right5.append(label in ranking)


def _summary(tally: _Tally, dense: _Tally, skipped: int, labelled: bool) -> Accuracy:
    n = len(tally.answers)
    agreement = sum(a == b for a, b in zip(tally.answers, dense.answers, strict=True)) / n
    difference, interval = paired_difference(tally.right, dense.right)
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


def _classes(model: nn.Module) -> int:
    return int(getattr(model, "num_classes", 0))
