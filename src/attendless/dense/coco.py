"""Images with boxes in COCO's JSON format.

    DIR/annotations/instances_train2017.json + instances_val2017.json, images in DIR/train2017 and DIR/val2017
    DIR/train.json + val.json, or DIR/instances.json alone (every tenth image is held out), images in DIR/images or DIR

Files are checked when they are opened. Boxes that cross the edge are clipped, boxes without area are removed, and the
notes state the number of both.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..data.source import load_image, some, upright_size
from ..errors import UserError

_EXPECTED = (
    "Expected COCO's annotations/instances_train….json and instances_val….json, train.json and val.json, or "
    "instances.json"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Boxes:
    """Images, each with its boxes [n, 4] (left, top, right, bottom) and their classes [n]."""

    folder: str
    #: COCO's entries of the images; `boxes` are rows of (left, top, right, bottom, class, crowd, area).
    images: tuple[Mapping[str, Any], ...]
    boxes: tuple[np.ndarray, ...]
    #: COCO's number and the name of each class.
    categories: tuple[tuple[int, str], ...]
    #: Corrections of the annotations, as text.
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.categories)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, dict[str, Any]]:
        """The image; its boxes and labels without crowds; and its index."""
        image = load_image(os.path.join(self.folder, self.images[index]["file_name"]))
        about = self.images[index]
        _check_size(about, image.size)
        found = self.boxes[index]
        single = found[found[:, 5] == 0]
        return image, {
            "boxes": single[:, :4].astype(np.float32),
            "labels": single[:, 4].astype(np.int64),
            "index": index,
        }

    def name(self, index: int) -> str:
        return str(self.images[index]["file_name"])

    def subset(self, indices: Iterable[int]) -> Boxes:
        chosen = list(indices)
        images, boxes = tuple(self.images[i] for i in chosen), tuple(self.boxes[i] for i in chosen)
        return dataclasses.replace(self, images=images, boxes=boxes)

    def truth(self, indices: Iterable[int]) -> dict[str, Any]:
        """The boxes of these images in COCO's format, for its metrics; ids of images and classes are their indices."""
        annotations: list[dict[str, Any]] = []
        chosen = list(indices)
        for index in chosen:
            for left, top, right, bottom, label, crowd, area in self.boxes[index].tolist():
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": index,
                        "category_id": int(label),
                        "bbox": [left, top, right - left, bottom - top],
                        "area": area,
                        "iscrowd": int(crowd),
                    }
                )
        images = [{"id": i, "width": self.images[i]["width"], "height": self.images[i]["height"]} for i in chosen]
        categories = [{"id": i, "name": name} for i, name in enumerate(self.classes)]
        return {"images": images, "annotations": annotations, "categories": categories}


def open_boxes(where: str | Path, hold_out: int = 10) -> tuple[Boxes, Boxes, str]:
    """Training and validation images, and a note on the split and on corrected annotations.

    Without splits, every `hold_out`-th image is held out; if `hold_out` is 0, all images serve for both.
    """
    root = Path(str(where)).expanduser()
    if not root.is_dir():
        raise UserError(f"--data {str(where)!r}: no such folder. {_EXPECTED}")
    files = {split: _annotations(root, split) for split in ("train", "val")}
    if files["train"] is not None and files["val"] is not None:
        train, val = (read_boxes(path, _pictures(root, path)) for path in files.values() if path is not None)
        if train.categories != val.categories:
            strange = sorted(set(val.classes) ^ set(train.classes))
            raise UserError(
                f"{files['train'].name} and {files['val'].name} differ in categories: {', '.join(strange[:5])}"
            )
        note = "the data's own splits"
    else:
        path = next((p for p in (files["train"], files["val"], root / "instances.json") if p and p.is_file()), None)
        if path is None:
            listing = sorted(p.name for p in root.iterdir())[:6]
            raise UserError(f"no annotations in {str(root)!r}, only {', '.join(listing) or 'nothing'}. {_EXPECTED}")
        whole = read_boxes(path, _pictures(root, path))
        if not hold_out:
            return whole, whole, "; ".join(["no splits: all images", *whole.notes])
        if len(whole) < hold_out:
            raise UserError(f"{str(path)!r} has too few images ({len(whole)}) to hold some out")
        held = range(hold_out // 2, len(whole), hold_out)
        train, val = whole.subset(sorted(set(range(len(whole))) - set(held))), whole.subset(held)
        note = f"one file of annotations: every {hold_out}th image is held out"
    return train, val, "; ".join([note, f"{len(train.classes)} classes", *dict.fromkeys((*train.notes, *val.notes))])


def _annotations(root: Path, split: str) -> Path | None:
    folder = root / "annotations"
    found = sorted(folder.glob(f"instances_{split}*.json")) if folder.is_dir() else []
    return found[0] if found else root / f"{split}.json" if (root / f"{split}.json").is_file() else None


def _pictures(root: Path, path: Path) -> Path:
    """The folder of the images of an annotation file."""
    named = path.stem.removeprefix("instances_")
    candidates = (root / named, root / "images" / named, root / "images", root)
    return next(folder for folder in candidates if folder.is_dir())


def read_boxes(path: Path, folder: Path) -> Boxes:
    """Read and check one file of annotations."""
    images, annotations, categories = _entries(path)
    place = {image["id"]: i for i, image in enumerate(images)}
    label = {category["id"]: i for i, category in enumerate(categories)}
    if len(place) < len(images) or len(label) < len(categories):
        raise UserError(f"{str(path)!r} contains an id of an image or a category twice")
    _check_pictures(images, path, folder)
    found: list[list[tuple[float, ...]]] = [[] for _ in images]
    cut, empty = list[Any](), list[Any]()
    for one in annotations:
        where = f"{str(path)!r}, annotation {one['id']}"
        if one.get("image_id") not in place:
            raise UserError(f"{where}: there is no image {one.get('image_id')!r}")
        if one.get("category_id") not in label:
            known = ", ".join(map(str, sorted(label, key=str)[:8]))
            raise UserError(
                f"{where}: unknown category {one.get('category_id')!r}. There are {known}" + ", …" * (len(label) > 8)
            )
        index = place[one["image_id"]]
        left, top, right, bottom = _corners(one.get("bbox"), where)
        width, height = images[index]["width"], images[index]["height"]
        inside = (max(0.0, left), max(0.0, top), min(float(width), right), min(float(height), bottom))
        if inside[2] - inside[0] <= 0 or inside[3] - inside[1] <= 0:
            empty.append(one["id"])
            continue
        if max(abs(a - b) for a, b in zip(inside, (left, top, right, bottom), strict=True)) > 1:
            cut.append(one["id"])
        crowd, area = one.get("iscrowd", 0), one.get("area")
        if area is None:
            area = (inside[2] - inside[0]) * (inside[3] - inside[1])
        if crowd not in (0, 1) or not _numbers(area) or area < 0:
            raise UserError(f"{where}: iscrowd {crowd!r}, area {area!r}: expected 0 or 1, and pixels")
        found[index].append((*inside, label[one["category_id"]], crowd, area))
    if not any(found):
        raise UserError(f"{str(path)!r} has no box inside its {len(images)} images")
    notes = _notes(path.name, len(images) - sum(map(bool, found)), cut, empty)
    names = tuple((category["id"], str(category.get("name", category["id"]))) for category in categories)
    boxes = tuple(np.array(rows, dtype=np.float64).reshape(-1, 7) for rows in found)
    return Boxes(str(folder), tuple(images), boxes, names, notes)


def _entries(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Images, annotations and categories of a file; raises unless each has an id, and ids are numbers or strings."""
    try:
        content = json.loads(path.read_text())
        images, annotations, categories = (content[name] for name in ("images", "annotations", "categories"))
        entries = [*images, *annotations, *categories]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} is not COCO's JSON: expected images, annotations, categories ({error!r})"
        ) from None
    if not images or not categories or not all(isinstance(one, dict) and "id" in one for one in entries):
        raise UserError(f"{str(path)!r}: expected images, annotations and categories, each with its id")
    for one in entries:
        for name in ("id", "image_id", "category_id"):
            if isinstance(one.get(name), list | dict):
                raise UserError(f"{str(path)!r}: {name} {one[name]!r}: expected a number or a string")
    return images, annotations, categories


def _check_pictures(images: Sequence[Mapping[str, Any]], path: Path, folder: Path) -> None:
    for image in images:
        if not all(type(image.get(name)) is int and image[name] > 0 for name in ("width", "height")):
            raise UserError(f"{str(path)!r}: image {image['id']} has no width and height")
        if not isinstance(image.get("file_name"), str):
            raise UserError(f"{str(path)!r}: image {image['id']} has no file_name")
    gone = [image["file_name"] for image in images if not (folder / image["file_name"]).is_file()]
    if gone:
        raise UserError(
            f"{len(gone)} of {len(images)} images of {str(path)!r} are not in {str(folder)!r}, first {gone[0]!r}"
        )
    for image in some(images):
        _check_size(image, upright_size(folder / image["file_name"]))


def _check_size(about: Mapping[str, Any], size: tuple[int, int] | None) -> None:
    """Raise if an image does not have the annotated size. `size` is None if the image cannot be read."""
    if size is not None and size != (about["width"], about["height"]):
        raise UserError(
            f"image {about['file_name']!r} is {size[0]}x{size[1]} pixels, but annotated as "
            f"{about['width']}x{about['height']}"
        )


def _corners(box: Any, where: str) -> tuple[float, float, float, float]:
    if not isinstance(box, list) or len(box) != 4 or not _numbers(*box) or min(box[2:]) < 0:
        raise UserError(f"{where}: bbox {box!r} is not valid: expected [left, top, width, height] in pixels")
    left, top, width, height = map(float, box)
    return left, top, left + width, top + height


def _numbers(*values: Any) -> bool:
    """Whether all are finite numbers."""
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _notes(name: str, bare: int, cut: Sequence[Any], empty: Sequence[Any]) -> tuple[str, ...]:
    notes = [f"{name}: {bare} images have no boxes and serve as background"] if bare else []
    notes += [f"{name}: {len(cut)} boxes cross the edge and are clipped, first annotation {cut[0]}"] if cut else []
    if empty:
        notes.append(f"{name}: {len(empty)} boxes have no area inside their image and are removed, first {empty[0]}")
    return tuple(notes)
