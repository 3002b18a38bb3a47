"""Detection and segmentation as tasks of the training loop: images, targets, scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..errors import UserError
from ..train.loader import Prepared
from ..train.objective import weighted
from ..train.state import Data
from ..train.task import Batch, Task
from .metrics import (
    coco_results,
    confusion,
    in_order,
    intersections,
    precisions,
)
from .transforms import (
    WholeMasks,
    WithBoxes,
    WithMasks,
    boxes_to_learn,
    masks_to_learn,
    to_judge,
)


class DenseObjective(nn.Module):
    """The weighted losses of a detector or segmentor, including those of its attentions."""

    def __init__(self, model: nn.Module, weights: Mapping[str, float]) -> None:
        super().__init__()
        self.model, self.weights = model, dict(weights)

    def forward(self, images: Tensor, targets: Any) -> dict[str, Tensor]:
        return weighted(self.model.losses(images, targets), self.weights)  # type: ignore[operator]


def _as_they_are(images: Tensor, targets: Any, step: int) -> tuple[Tensor, Any]:
    return images, targets


@dataclasses.dataclass(frozen=True)
class DenseTask:
    """What detection and segmentation share."""

    def told(self, data: Data, recipe: Any) -> dict[str, Any]:
        return {
            "input_size": (3, *data.size),
            "mean": tuple(data.mean),
            "std": tuple(data.std),
            "longest": recipe.longest,
            "num_classes": data.classes,
            "label_names": data.names or None,
        }

    def batches(self, data: Data, recipe: Any) -> Batch:
        return _as_they_are


class Detection(DenseTask):
    def drawn(self, data: Data, recipe: Any) -> Prepared:
        transform: Any = boxes_to_learn(recipe, data.size[0], data.mean, data.std)
        return WithBoxes(data.train, transform, recipe.seed, stand_in=True)

    def judged(self, data: Data, recipe: Any) -> Prepared:
        return WithBoxes(data.val, to_judge(data.size[0], recipe.longest, data.mean, data.std), recipe.seed)

    def evaluate(
        self, model: nn.Module, loader: DataLoader[Any], accelerator: Accelerator, data: Data
    ) -> dict[str, Any]:
        return detect_all(model, loader, accelerator, data.val)

    def score(self, data: Data, found: dict[str, Any], loss: float) -> float:
        return found["ap"]


class Segmentation(DenseTask):
    def drawn(self, data: Data, recipe: Any) -> Prepared:
        transform: Any = masks_to_learn(recipe, data.size, data.mean, data.std)
        return WithMasks(data.train, transform, recipe.seed, stand_in=True)

    def judged(self, data: Data, recipe: Any) -> Prepared:
        return WholeMasks(data.val, to_judge(min(data.size), recipe.longest, data.mean, data.std), recipe.seed)

    def evaluate(
        self, model: nn.Module, loader: DataLoader[Any], accelerator: Accelerator, data: Data
    ) -> dict[str, Any]:
        return segment_all(model, loader, accelerator, data.classes)

    def score(self, data: Data, found: dict[str, Any], loss: float) -> float:
        return found["miou"]


TASK: dict[str, Task] = {"detection": Detection(), "segmentation": Segmentation()}


@torch.no_grad()
def detect_all(model: nn.Module, loader: DataLoader[Any], accelerator: Accelerator, source: Any) -> dict[str, Any]:
    """Average precisions over all processes, each image once; boxes are compared in pixels of the files."""
    model.eval()
    rows: list[dict[str, Any]] = []
    seen: list[int] = []
    skipped = 0
    for images, targets, bad in loader:
        skipped += len(bad)
        if images is None:
            continue
        sizes = [tuple(target["sizes"][1].tolist()) for target in targets]
        for target, found in zip(targets, each(images.to(accelerator.device), sizes, model), strict=True):
            index = int(target["index"])
            seen.append(index)
            rows += coco_results(index, {**found, "boxes": in_file(found["boxes"], target["sizes"])})
    rows, seen = gather_object(rows), gather_object(seen)
    skipped = sum(gather_object([skipped]))
    found = precisions(source.truth(sorted(set(seen))), in_order(rows))
    return {"images": len(set(seen)), "skipped": skipped, **found}


def in_file(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Boxes in pixels of a transformed image → pixels of its file; `sizes` are those of the file and of the image."""
    (height, width), (now_height, now_width) = sizes.tolist()
    scale = boxes.new_tensor([width / now_width, height / now_height] * 2)
    return boxes * scale


@torch.no_grad()
def segment_all(
    model: nn.Module,
    loader: DataLoader[Any],
    accelerator: Accelerator,
    classes: int,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> dict[str, Any]:
    """Mean intersection over union over all processes, in pixels of the files' masks. Predictions are averaged
    over `scales` and, with `flip`, over mirror images."""
    model.eval()
    table = torch.zeros(classes, classes, dtype=torch.long)
    ask = partial(probabilities, model, scales=scales, flip=flip)
    images_seen = skipped = 0
    for images, targets, bad in loader:
        skipped += len(bad)
        if images is None:
            continue
        sizes = [tuple(target["size"].tolist()) for target in targets]
        for target, answer in zip(targets, each(images.to(accelerator.device), sizes, ask), strict=True):
            fine = F.interpolate(answer[None], target["mask"].shape, mode="bilinear")[0]
            table += confusion(fine.argmax(0).cpu(), target["mask"], classes)
            images_seen += 1
    counted = torch.tensor([images_seen, skipped], device=accelerator.device)
    table = accelerator.reduce(table.to(accelerator.device), reduction="sum").cpu()
    images_seen, skipped = accelerator.reduce(counted, reduction="sum").tolist()
    return {"images": images_seen, "skipped": skipped, **intersections(table)}


def each(images: Tensor, sizes: Sequence[tuple[int, int]], answer: Callable[[Tensor], Iterable[Any]]) -> list[Any]:
    """The results of `answer` for each image of a padded batch, as for single images: images of one size run together,
    without padding, which would change the positions of their tokens."""
    found: list[Any] = [None] * len(sizes)
    for height, width in dict.fromkeys(sizes):
        same = [i for i, size in enumerate(sizes) if size == (height, width)]
        for i, one in zip(same, answer(images[same, :, :height, :width]), strict=True):
            found[i] = one
    return found


def probabilities(model: nn.Module, images: Tensor, scales: Sequence[float] = (1.0,), flip: bool = False) -> Tensor:
    """Class probabilities of every pixel [B, classes, h, w], averaged over scales and mirror images."""
    height, width = images.shape[-2:]
    total: Any = 0.0
    for scale in scales:
        sized = images
        if scale != 1:
            sides = (max(1, round(height * scale)), max(1, round(width * scale)))
            sized = F.interpolate(images, sides, mode="bilinear", antialias=True)
        for mirrored in (False, True) if flip else (False,):
            logits = model(sized.flip(-1) if mirrored else sized).float()
            if not logits.isfinite().all():
                raise UserError("the model returns NaN or infinity")
            shares = (logits.flip(-1) if mirrored else logits).softmax(1)
            total = total + (F.interpolate(shares, (height, width), mode="bilinear") if scale != 1 else shares)
    return total / (len(scales) * (2 if flip else 1))
