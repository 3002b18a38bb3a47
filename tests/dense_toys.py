"""Small annotated pictures: coloured rectangles on noise, their boxes as COCO's JSON and their masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from attendless.train import Run

MODEL = "columnar_micro_patch4_32"
RUN = Run(workers=0, checkpoint_minutes=0.0, log_every=1)
#: A run that ends within seconds.
SHORT: dict[str, Any] = {"epochs": 2, "batch": 4, "size": (32,), "lr": 1e-3}
HEADS = {"detection": "retinanet:channels=8", "segmentation": "semantic_fpn:channels=16"}


def rectangles(count: int, seed: int = 0, times: int = 1) -> list[tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]]:
    """Pictures, masks (0 background, 1 red, 2 green) and (left, top, width, height, class) of what is on them.
    They are about 40 pixels wide and high, or so many `times` that."""
    draw = np.random.default_rng(seed)
    made = []
    for i in range(count):
        width, height = (48 * times, 32 * times) if i % 2 else (36 * times, 44 * times)
        pixels = draw.integers(0, 80, (height, width, 3), dtype=np.uint8)
        mask = np.zeros((height, width), dtype=np.uint8)
        w, h, kind = (*draw.integers(10 * times, 20 * times, 2).tolist(), i % 2)
        left, top = int(draw.integers(0, width - w)), int(draw.integers(0, height - h))
        pixels[top : top + h, left : left + w, kind] = 230
        mask[top : top + h, left : left + w] = kind + 1
        made.append((pixels, mask, [(left, top, w, h, kind + 1)]))
    return made


def toy_masks(root: Path, train: int = 8, val: int = 4, times: int = 1) -> Path:
    for split, count, seed in (("train", train, 0), ("val", val, 1)):
        for folder in ("images", "masks"):
            (root / split / folder).mkdir(parents=True)
        for i, (pixels, mask, _) in enumerate(rectangles(count, seed, times)):
            Image.fromarray(pixels).save(root / split / "images" / f"{i}.png")
            Image.fromarray(mask).save(root / split / "masks" / f"{i}.png")
    return root


def toy_boxes(root: Path, train: int = 8, val: int = 4) -> Path:
    (root / "images").mkdir(parents=True)
    for split, count, seed in (("train", train, 0), ("val", val, 1)):
        images, annotations = [], []
        for i, (pixels, _, boxes) in enumerate(rectangles(count, seed)):
            name = f"{split}{i}.png"
            Image.fromarray(pixels).save(root / "images" / name)
            images.append({"id": i + 10, "file_name": name, "width": pixels.shape[1], "height": pixels.shape[0]})
            for left, top, w, h, kind in boxes:
                box = {"bbox": [left, top, w, h], "area": w * h, "iscrowd": 0}
                annotations.append({"id": len(annotations) + 1, "image_id": i + 10, "category_id": kind, **box})
        content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        (root / f"{split}.json").write_text(json.dumps(content))
    return root


CATEGORIES = [{"id": 1, "name": "red"}, {"id": 2, "name": "green"}]
TOYS = {"detection": toy_boxes, "segmentation": toy_masks}
