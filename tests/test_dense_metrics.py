"""The numbers detection and segmentation are judged by, against other ways to compute them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from attendless.dense.metrics import (
    coco_results,
    confusion,
    in_order,
    intersections,
    precisions,
)


def test_intersection_over_union_by_counting_pixels() -> None:
    draw = np.random.default_rng(0)
    truth, answers = draw.integers(0, 4, (3, 9, 7)), draw.integers(0, 4, (3, 9, 7))
    truth[draw.random((3, 9, 7)) < 0.2] = 255
    each = []
    for label in range(4):
        there, said = (truth == label), (answers == label) & (truth != 255)
        each.append(100 * (there & said).sum() / (there | said).sum())
    table = sum(confusion(torch.from_numpy(a), torch.from_numpy(t), 4) for a, t in zip(answers, truth, strict=True))
    found = intersections(table)  # type: ignore[arg-type]
    assert found["miou"] == pytest.approx(np.mean(each))
    assert found["iou"] == pytest.approx(each, abs=1e-3)
    assert found["pixels_right"] == pytest.approx(100 * (truth == answers).sum() / (truth != 255).sum())


def test_a_class_that_never_occurs_does_not_count() -> None:
    found = intersections(torch.tensor([[5, 0, 0], [0, 3, 0], [0, 0, 0]]))
    assert (found["miou"], found["iou"][2]) == (100.0, None)


def pictures(seed: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Boxes of three sizes, and detections that nearly find them, with some that are wrong."""
    draw = torch.Generator().manual_seed(seed)
    truths, found = [], []
    for _ in range(12):
        count = int(torch.randint(1, 6, (), generator=draw))
        corner = 200 * torch.rand(count, 2, generator=draw)
        side = torch.tensor([20.0, 60, 150])[torch.randint(3, (count, 1), generator=draw)]
        boxes = torch.cat([corner, corner + side * (1 + torch.rand(count, 2, generator=draw))], dim=1)
        labels = torch.randint(0, 3, (count,), generator=draw)
        truths.append({"boxes": boxes, "labels": labels})
        near = boxes + 6 * torch.randn(boxes.shape, generator=draw)
        guessed = torch.where(torch.rand(count, generator=draw) < 0.8, labels, (labels + 1) % 3)
        extra = torch.tensor([[5.0, 5, 60, 60]])
        found.append(
            {
                "boxes": torch.cat([near, extra]),
                "scores": torch.rand(count + 1, generator=draw),
                "labels": torch.cat([guessed, torch.tensor([0])]),
            }
        )
    return truths, found


def coco(truths: list[dict[str, Tensor]]) -> dict[str, list[dict[str, object]]]:
    annotations = []
    for image, truth in enumerate(truths):
        for (left, top, right, bottom), label in zip(truth["boxes"].tolist(), truth["labels"].tolist(), strict=True):
            box = {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
            number = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "iscrowd": 0}
            annotations.append({**number, **box})
    categories = [{"id": i, "name": str(i)} for i in range(3)]
    return {"images": [{"id": i} for i in range(len(truths))], "annotations": annotations, "categories": categories}


@pytest.mark.parametrize("seed", range(3))
def test_pycocotools_agrees_with_torchmetrics(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from torchmetrics.detection import MeanAveragePrecision
    truths, found = pictures(seed)
    rows = [row for i, one in enumerate(found) for row in coco_results(i, one)]
    ours = precisions(coco(truths), in_order(rows))
    # Its own recall thresholds are single precision: 0.3 then lies above a recall of 3/10.
    recalls, overlaps = np.linspace(0, 1, 101).tolist(), np.linspace(0.5, 0.95, 10).tolist()
    other = MeanAveragePrecision("xyxy", iou_thresholds=overlaps, rec_thresholds=recalls)
    other.update(found, truths)
    theirs = other.compute()
    names = {"ap": "map", "ap50": "map_50", "ap75": "map_75", "ap_small": "map_small", "ap_medium": "map_medium"}
    for name, theirs_name in {**names, "ap_large": "map_large"}.items():
        assert ours[name] == pytest.approx(100 * float(theirs[theirs_name]), abs=1e-4), name
    assert 5 < ours["ap"] < 95


def test_perfect_detections_are_perfect_and_none_are_nothing() -> None:
    truths, _ = pictures(0)
    rows = [row for i, t in enumerate(truths) for row in coco_results(i, {**t, "scores": torch.ones(len(t["labels"]))})]
    assert precisions(coco(truths), rows)["ap"] == pytest.approx(100)
    assert precisions(coco(truths), [])["ap"] == 0


def test_a_size_that_no_box_has_is_not_measured() -> None:
    truths = [{"boxes": torch.tensor([[0.0, 0, 200, 200]]), "labels": torch.tensor([0])}]
    rows = coco_results(0, {**truths[0], "scores": torch.ones(1)})
    found = precisions(coco(truths), rows)
    assert (found["ap_large"], found["ap_small"]) == (pytest.approx(100), None)
