"""Metrics of detection and segmentation: COCO's average precisions (pycocotools), mean intersection over union.

All are in percent.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .masks import IGNORE_INDEX

#: COCO's first six numbers, in its order.
PRECISIONS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def confusion(answers: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Confusion matrix [classes, classes]: true class (rows) by predicted class (columns), without ignored pixels."""
    counts = truth != IGNORE_INDEX
    return torch.bincount(truth[counts].long() * classes + answers[counts].long(), minlength=classes**2).view(
        classes, classes
    )


def intersections(table: Tensor) -> dict[str, Any]:
    """From a confusion matrix: IoU per class, the mean over the classes that occur, and pixel accuracy."""
    table = table.double()
    right, union = table.diag(), table.sum(0) + table.sum(1) - table.diag()
    each = 100 * right / union
    there = union > 0
    return {
        "miou": float(each[there].mean()) if there.any() else 0.0,
        "pixels_right": float(100 * right.sum() / table.sum().clamp(min=1)),
        "iou": [round(float(value), 3) if ok else None for value, ok in zip(each, there.tolist(), strict=True)],
    }


def coco_results(index: int, found: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Detections of one image as COCO's result rows."""
    boxes = found["boxes"].detach().cpu().double()
    rows = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1).tolist()
    scores, labels = found["scores"].tolist(), found["labels"].tolist()
    return [
        {"image_id": index, "category_id": label, "bbox": box, "score": score}
        for box, score, label in zip(rows, scores, labels, strict=True)
    ]


def precisions(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """COCO's average precisions; None for a size class without boxes."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise UserError("the metrics of detection need pycocotools: pip install 'attendless[dense]'") from None
    if not results:
        return dict.fromkeys(PRECISIONS, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints every step
        known = COCO()
        known.dataset = {"info": {}, **truth}
        known.createIndex()
        judge = COCOeval(known, known.loadRes([dict(row) for row in results]), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {
        name: None if value < 0 else 100 * float(value) for name, value in zip(PRECISIONS, judge.stats, strict=False)
    }


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Detections of all processes in one order, independent of the number of processes."""
    return sorted(rows, key=lambda row: (row["image_id"], -row["score"]))
