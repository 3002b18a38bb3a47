"""Images on disk: which layouts are understood, and how one file becomes an upright RGB picture.

    DIR/{train,val}/<class>/…/x.jpg   class names, in sorted order; `valid`, `validation`, `test`, `eval` serve as val
    DIR/<class>/x.jpg                 one set, no splits
    DIR/<class index>/x.jpg           folders named by whole numbers: the number is the label
    DIR/val/images + val_annotations.txt   Tiny-ImageNet's own layout
    DIR/*.bin                         CIFAR's binary version
    DIR/x.jpg, DIR/images/x.jpg       pictures without labels
    scenes, scenes:size=64            the embedded data set
    CIFAR10@DIR                       any torchvision classification set already in DIR

A data set is a `Source`: a length, `source[i] -> (picture, label)`, the class names and a name for each picture.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image, ImageOps

from ..errors import UserError

#: The label of a picture that is not there: it could not be read, or it only fills up a batch.
IGNORE = -1
SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"})
Split = Literal["train", "val"]
_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "eval"),
}


class BadImage(UserError):
    """A file that cannot be decoded; the text names it and says why."""


class Source(Protocol):
    """A set of pictures. `classes` is empty where nothing is labelled; unreadable pictures raise `BadImage`."""

    @property
    def classes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Image.Image, int]: ...

    def name(self, index: int) -> str: ...


@dataclasses.dataclass(frozen=True)
class Files:
    """Picture files below `root`. Names are kept as text: a million `Path`s would be slow and large."""

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


def load_image(path: str | Path) -> Image.Image:
    """Decode one file into an upright RGB picture, or raise `BadImage`.

    EXIF rotation is applied; greyscale (8 and 16 bit), palette, CMYK and transparent pictures become RGB.
    """
    try:
        if not os.path.isfile(path):  # a pipe would wait for ever
            raise OSError("no such file" if not os.path.lexists(path) else "not a regular file")
        with Image.open(path) as image:
            image.load()
            return _rgb(_upright(image))
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
        raise BadImage(f"cannot read image {str(path)!r}: {error or type(error).__name__}") from None


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF in a sound picture: take the pixels as they are
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        values = np.asarray(image).astype(np.float64)
        values = values / 257 if values.max(initial=0) > 255 else values
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def open_data(where: str | Path, split: Split = "val") -> Source:
    """The images that `where` names. A folder without splits serves whole, whichever split is asked for."""
    from . import named

    text = str(where)
    root = Path(text).expanduser()
    if not root.exists():
        return named.open_named(text, split)
    if not root.is_dir():
        raise UserError(f"--data {text!r} is a file: expected a folder of images. {_expected(root.parent)}")
    if named.is_cifar(root):
        return named.Cifar.open(root, split)
    return _open_folder(root, split)


def open_splits(where: str | Path, hold_out: int = 10) -> tuple[Source, Source, str]:
    """Training and validation images, and a note on how they were told apart.

    Where a folder has no splits of its own, every `hold_out`-th image is kept for validation.
    """
    train, val = open_data(where, "train"), open_data(where, "val")
    if isinstance(train, Files) and train == val:
        if len(train) < hold_out:
            raise UserError(f"--data {str(where)!r} has no val folder, and too few images to hold some out")
        # Files are sorted by class, so this takes of each class its share.
        held = range(hold_out // 2, len(train), hold_out)
        rest = sorted(set(range(len(train))) - set(held))
        return train.subset(rest), train.subset(held), f"no val folder: every {hold_out}th image is held out"
    return train, val, "the data's own splits"


def _open_folder(root: Path, split: Split) -> Files:
    folders = {name.lower(): root / name for name in _directories(root)}
    found = {s: next((folders[n] for n in names if n in folders), None) for s, names in _FOLDERS.items()}
    train, chosen = found["train"], found[split]
    if train is None or chosen is None:
        if train is not None or (found["val"] is not None and split == "train"):
            missing, instead = (split, "train") if train is not None else ("train", "val")
            raise UserError(f"--data {str(root)!r} has a {instead} folder but no {missing} folder. {_expected(root)}")
        return _read_classes(found["val"] or root, None)
    classes = _read_classes(train, None).classes
    if (chosen / "val_annotations.txt").is_file():
        return _read_annotations(chosen, classes)
    return _read_classes(chosen, classes or None)


def _read_classes(root: Path, classes: Sequence[str] | None) -> Files:
    """One folder per class. `classes`, if given, fixes the labels (validation follows training)."""
    names = sorted(_directories(root))
    if not names or "images" in names:
        unlabelled = _images(root / "images" if "images" in names else root, root)
        if not unlabelled:
            raise UserError(f"no images in {str(root)!r}. {_expected(root)}")
        return Files(str(root), unlabelled, (0,) * len(unlabelled))
    by_number = all(name.isdecimal() and name.isascii() for name in names)
    if classes is None:
        classes = [str(i) for i in range(max(map(int, names)) + 1)] if by_number else names
    label = {name: i for i, name in enumerate(classes)}
    known = {name: str(int(name)) if by_number and name not in label else name for name in names}
    strange = [name for name in names if known[name] not in label]
    if strange:
        raise UserError(f"{str(root)!r} holds classes that training does not know: {', '.join(strange[:5])}")
    files: list[str] = []
    labels: list[int] = []
    for name in names:
        here = _images(root / name, root)
        if not here:
            raise UserError(f"folder {str(root / name)!r} holds no images, so it is no class. {_expected(root)}")
        files += here
        labels += [label[known[name]]] * len(here)
    return Files(str(root), tuple(files), tuple(labels), tuple(classes))


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
        raise UserError(f"{str(root / 'val_annotations.txt')!r} names no images")
    return Files(str(root), tuple(files), tuple(labels), tuple(classes))


def _directories(root: Path) -> list[str]:
    return [entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]


def _images(folder: Path, root: Path) -> tuple[str, ...]:
    """Every image file below `folder`, relative to `root`, in an order that does not depend on the file system."""
    found = []
    for place, _, names in os.walk(folder):
        inside = os.path.relpath(place, root)
        found += [os.path.join(inside, n) for n in names if os.path.splitext(n)[1].lower() in SUFFIXES and n[0] != "."]
    return tuple(sorted(os.path.normpath(name) for name in found))


def _expected(root: Path) -> str:
    listing = sorted(os.listdir(root)) if root.is_dir() else []
    shown = ", ".join(listing[:6]) + (", …" if len(listing) > 6 else "")
    return (
        "Expected train/ and val/ with one folder per class, or one folder per class (named, or numbered by class "
        f"index), or images alone. Found: {shown or 'nothing'}"
    )
