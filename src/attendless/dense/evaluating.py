"""`evaluate`: metrics, MACs and throughput of detectors and segmentors on annotated images."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..backbones.cost import parameters
from ..errors import UserError
from ..sizes import image_config
from ..train.loader import eval_loader
from ..train.process import accelerator as make_accelerator
from .coco import open_boxes
from .cost import dense_macs
from .masks import open_masks
from .model import Dense
from .tasks import detect_all, segment_all
from .transforms import WholeMasks, WithBoxes, to_judge

#: Scales over which `several_scales` averages predictions, each also mirrored.
SEVERAL = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)


def judged(model: Dense, data: str | Path, limit: int | None = None) -> Any:
    """The validation images of `data` (all if there are no splits), or `limit` of them, evenly spaced."""
    source: Any = (open_boxes if model.task == "detection" else open_masks)(data, hold_out=0)[1]
    check_classes(model, source.classes)
    if limit is None or limit >= len(source):
        return source
    return source.subset([int(i * len(source) / limit) for i in range(limit)])


def evaluate(
    model: Dense,
    data: Any,
    *,
    size: int | None = None,
    batch: int = 4,
    workers: int = 0,
    several_scales: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate a detector or segmentor on annotated images.

    Args:
        model: A detector or segmentor.
        data: A folder of annotated images, or the result of `judged`.
        size: Length of the images' short side; default: that of the training.
        batch: Number of images per batch.
        workers: Number of processes that load images; 0 loads them in this one.
        several_scales: Whether predictions are averaged over six scales and mirror images (segmentation only).
        progress: Receives the number of images of each batch.

    Returns:
        The metrics of the model's task, parameters, multiply-accumulates, and the throughput of the model alone in
        images/s, as JSON values.

    Raises:
        UserError: the classes of the data are not those of the model.
    """
    if several_scales and model.task != "segmentation":
        raise UserError("--several-scales is for segmentation only")
    source = judged(model, data) if isinstance(data, str | Path) else data
    config = image_config(model)
    side = size or min(config["input_size"][-2:])
    transform: Any = to_judge(side, max(config.get("longest", 1333), side), config["mean"], config["std"])
    kind = WithBoxes if model.task == "detection" else WholeMasks
    loader: Any = eval_loader(kind(source, transform), batch, workers)
    judge = make_accelerator("cpu" if next(model.parameters()).device.type == "cpu" else "auto")
    clock = Clock(model)
    counted: Any = Counted(loader, progress)
    if model.task == "detection":
        found = detect_all(clock, counted, judge, source)
    else:
        scales = SEVERAL if several_scales else (1.0,)
        found = segment_all(clock, counted, judge, model.num_classes, scales, flip=several_scales)
    return {
        "task": model.task,
        "head": model.head_text,
        "attention": model.attention,
        "tokens_spec": model.tokens or None,
        "size": side,
        "params": parameters(model),
        "macs": dense_macs(model, (side, side)).as_dict(),
        "throughput": found["images"] / clock.seconds if clock.seconds else None,
        **found,
    }


def check_classes(model: Dense, classes: Sequence[str]) -> None:
    """Raise unless the classes of the data are those of the model, in the same order."""
    names = tuple(map(str, image_config(model).get("label_names") or ()))
    if len(classes) != model.num_classes:
        raise UserError(f"the model has {model.num_classes} classes, but the data has {len(classes)}")
    strange = [f"{ours!r}, not {theirs!r}" for ours, theirs in zip(names, classes, strict=False) if ours != theirs]
    if strange:
        raise UserError(f"the classes of the model and of the data differ: {'; '.join(strange[:3])}")


class Clock(nn.Module):
    """Wraps a model and sums the time of its forward passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.seconds = model, 0.0

    def forward(self, *given: Any) -> Any:
        start = time.perf_counter()
        answer = self.model(*given)
        if isinstance(given[0], torch.Tensor) and given[0].is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        return answer


class Counted:
    """A loader that reports every batch to `progress`."""

    def __init__(self, loader: DataLoader[Any], progress: Callable[[int], None] | None) -> None:
        self.loader, self.progress = loader, progress

    def __iter__(self) -> Any:
        for images, targets, bad in self.loader:
            yield images, targets, bad
            if self.progress is not None:
                self.progress(len(bad) + (0 if images is None else len(images)))
