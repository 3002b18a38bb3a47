"""Folders of image files, in the layouts that `opening` lists."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from ..errors import UserError
from .labels import is_index
from .source import Split, load_image

SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"})
_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "eval"),
}


@dataclasses.dataclass(frozen=True)
class Files:
    """Image files below `root`. Names are strings: a million `Path`s would be slow and large."""

    root: str
    files: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return load_image(os.path.join(self.root, self.files[index])), self.labels[index]

    def name(self, index: int) -> str:
        return self.files[index]

    def subset(self, indices: Iterable[int]) -> Files:
        chosen = list(indices)
        files, labels = tuple(self.files[i] for i in chosen), tuple(self.labels[i] for i in chosen)
        return dataclasses.replace(self, files=files, labels=labels)


def open_folder(root: Path, split: Split, *, labels: bool = True) -> Files:
    """The images of one split; without `labels`, all images below its folder."""
    folders = {name.lower(): root / name for name in _directories(root)}
    found = {s: next((folders[n] for n in names if n in folders), None) for s, names in _FOLDERS.items()}
    train, chosen = found["train"], found[split]
    if not labels:
        return _read_unlabelled(chosen or root, chosen or root)
    if train is None or chosen is None:
        if train is not None or (found["val"] is not None and split == "train"):
            missing, instead = (split, "train") if train is not None else ("train", "val")
            raise UserError(f"--data {str(root)!r} has a {instead} folder but no {missing} folder. {expected(root)}")
        return _read_classes(found["val"] or root, None)
    classes = _read_classes(train, None).classes
    if (chosen / "val_annotations.txt").is_file():
        return _read_annotations(chosen, classes)
    return _read_classes(chosen, classes or None)


def _read_classes(root: Path, classes: Sequence[str] | None) -> Files:
    """One folder per class. `classes`, if given, determines the labels (validation follows training)."""
    names = sorted(_directories(root))
    if not names or "images" in names:
        return _read_unlabelled(root, root / "images" if "images" in names else root)
    by_number = all(map(is_index, names))
    if classes is None:
        classes = [str(i) for i in range(max(map(int, names)) + 1)] if by_number else names
    label = {name: i for i, name in enumerate(classes)}
    known = {name: str(int(name)) if by_number and name not in label else name for name in names}
    strange = [name for name in names if known[name] not in label]
    if strange:
        raise UserError(f"{str(root)!r} contains classes that the training data lacks: {', '.join(strange[:5])}")
    files: list[str] = []
    labels: list[int] = []
    for name in names:
        here = images_below(root / name, root)
        if not here:
            raise UserError(f"folder {str(root / name)!r} contains no images. {expected(root)}")
        files += here
        labels += [label[known[name]]] * len(here)
    return Files(str(root), tuple(files), tuple(labels), tuple(classes))


def _read_unlabelled(root: Path, folder: Path) -> Files:
    files = images_below(folder, root)
    if not files:
        raise UserError(f"no images in {str(root)!r}. {expected(root)}")
    return Files(str(root), files, (0,) * len(files))


def _read_annotations(root: Path, classes: Sequence[str]) -> Files:
    """Tiny-ImageNet's validation folder: `val_annotations.txt` gives each file of `images/` its class."""
    label = {name: i for i, name in enumerate(classes)}
    files, labels = [], []
    for number, line in enumerate((root / "val_annotations.txt").read_text(errors="replace").splitlines(), 1):
        fields = line.split("\t")
        if not line.strip():
            continue
        if len(fields) < 2 or fields[1] not in label or os.path.basename(fields[0]) != fields[0]:
            raise UserError(
                f"{str(root / 'val_annotations.txt')!r} line {number}: expected FILE<tab>CLASS, got {line!r}"
            )
        files.append(os.path.join("images", fields[0]))
        labels.append(label[fields[1]])
    if not files:
        raise UserError(f"{str(root / 'val_annotations.txt')!r} lists no images")
    return Files(str(root), tuple(files), tuple(labels), tuple(classes))


def _directories(root: Path) -> list[str]:
    return [entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]


def images_below(folder: Path, root: Path) -> tuple[str, ...]:
    """Every image file below `folder`, relative to `root`, in an order that does not depend on the file system."""
    found = []
    for place, _, names in os.walk(folder):
        inside = os.path.relpath(place, root)
        found += [os.path.join(inside, n) for n in names if os.path.splitext(n)[1].lower() in SUFFIXES and n[0] != "."]
    return tuple(sorted(os.path.normpath(name) for name in found))


def expected(root: Path) -> str:
    listing = sorted(os.listdir(root)) if root.is_dir() else []
    shown = ", ".join(listing[:6]) + (", …" if len(listing) > 6 else "")
    return (
        "Expected train/ and val/ with one folder per class, or one folder per class (named, or numbered by class "
        f"index), or images alone. Found: {shown or 'nothing'}"
    )
