"""Images with masks whose pixels are class numbers: folders of masks, VOC's and ADE20K's layouts.

    DIR/{train,val}/images/x.jpg + masks/x.png    `labels`, `annotations`, `trimaps`, `SegmentationClass` serve as masks
    DIR/images/x.jpg + masks/x.png                one set: every tenth image is held out
    DIR/images/{training,validation} + annotations/{training,validation}     ADE20K: 0 is ignored, 1 is the first class
    DIR/JPEGImages + SegmentationClass + ImageSets/Segmentation/{train,val}.txt    VOC

The classes are the numbers that occur in the masks, in order; 255 is always ignored. `DIR/classes.txt` names them, one
per line, `NUMBER NAME`; other numbers then raise an error.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ..data.folders import SUFFIXES
from ..data.source import Split, load_image, some, upright_size
from ..errors import UserError

#: Value of mask pixels that losses and metrics ignore.
IGNORE_INDEX = 255
_MASKS = ("masks", "labels", "annotations", "trimaps", "SegmentationClass")
_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test")}
_EXPECTED = "Expected train/ and val/, each with images/ and masks/, or VOC's or ADE20K's folders"


@dataclasses.dataclass(frozen=True)
class Masks:
    """Images, their masks, and the class of each mask number."""

    root: str
    #: Paths of each image and its mask, relative to `root`.
    files: tuple[tuple[str, str], ...]
    #: The class of each number. Numbers in `ignored` are skipped, all others raise an error.
    numbers: Mapping[int, int]
    classes: tuple[str, ...]
    ignored: frozenset[int] = frozenset({IGNORE_INDEX})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """The image, and the class of each pixel [height, width]."""
        image = load_image(os.path.join(self.root, self.files[index][0]))
        return image, self.mask(index, image.size)

    def mask(self, index: int, size: tuple[int, int]) -> np.ndarray:
        path = os.path.join(self.root, self.files[index][1])
        found = read_mask(path, size)
        table = np.full(256, -1, dtype=np.int16)
        table[list(self.ignored)] = IGNORE_INDEX
        for number, label in self.numbers.items():
            table[number] = label
        classes = table[found]
        if (classes < 0).any():
            raise no_class(path, int(found[classes < 0][0]), self.numbers)
        return classes.astype(np.uint8)

    def name(self, index: int) -> str:
        return self.files[index][0]

    def subset(self, indices: Iterable[int]) -> Masks:
        return dataclasses.replace(self, files=tuple(self.files[i] for i in indices))


def no_class(path: str, number: int, numbers: Iterable[int]) -> UserError:
    known = sorted(numbers)
    text = ", ".join(map(str, known[:12])) + ", …" * (len(known) > 12)
    return UserError(f"mask {path!r} contains the number {number}, which is not a class: expected {text}")


def read_mask(path: str, size: tuple[int, int] | None) -> np.ndarray:
    """The numbers of a mask's pixels [height, width], as stored in the file. `size` is the width and height of the
    image, or None if the image cannot be read."""
    try:
        with Image.open(path) as image:
            image.load()
            mode, found = image.mode, np.asarray(image)
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
        raise UserError(f"cannot read mask {path!r}: {error or type(error).__name__}") from None
    if found.ndim != 2 or mode not in ("L", "P", "1", "I;16", "I"):
        raise UserError(f"mask {path!r} has colours ({mode}): expected one number per pixel, the number of its class")
    if found.size and not 0 <= found.min() <= found.max() <= 255:
        strange = int(found.max() if found.max() > 255 else found.min())
        raise UserError(f"mask {path!r} contains the number {strange}: expected 0 to 255")
    if size is not None and found.shape != (size[1], size[0]):
        width, height = found.shape[1], found.shape[0]
        raise UserError(f"mask {path!r} is {width}x{height} pixels, but its image is {size[0]}x{size[1]}")
    return found.astype(np.uint8)


def open_masks(where: str | Path, hold_out: int = 10) -> tuple[Masks, Masks, str]:
    """Training and validation images, and a note on how they were split. Without splits, every `hold_out`-th image is
    held out; if `hold_out` is 0, all images serve for both."""
    root = Path(str(where)).expanduser()
    if not root.is_dir():
        raise UserError(f"--data {str(where)!r}: no such folder. {_EXPECTED}")
    pairs, ignored = _layout(root)
    note = "the data's own splits"
    if "" in pairs:
        whole = pairs[""]
        if not hold_out:
            pairs, note = {"train": whole, "val": whole}, "no splits: all images"
        elif len(whole) < hold_out:
            raise UserError(f"--data {str(where)!r} has no val folder, and too few images to hold some out")
        else:
            held = whole[hold_out // 2 :: hold_out]
            pairs = {"train": [pair for pair in whole if pair not in set(held)], "val": held}
            note = f"no val folder: every {hold_out}th image is held out"
    ignored |= {IGNORE_INDEX}
    numbers, names = _classes(root, pairs, ignored)
    made = {split: Masks(str(root), tuple(files), numbers, names, ignored) for split, files in pairs.items()}
    return made["train"], made["val"], f"{note}; {len(names)} classes"


def _layout(root: Path) -> tuple[dict[str, list[tuple[str, str]]], frozenset[int]]:
    """Images and masks of each split (all under "" if there are no splits), and the ignored numbers."""
    if (root / "ImageSets" / "Segmentation").is_dir():
        return {split: _voc(root, split) for split in _SPLITS}, frozenset()
    if (root / "images" / "training").is_dir():
        folders = {split: names[1] for split, names in _SPLITS.items()}
        return {s: _pairs(root, f"images/{f}", f"annotations/{f}") for s, f in folders.items()}, frozenset({0})
    found = {split: next((n for n in names if (root / n).is_dir()), None) for split, names in _SPLITS.items()}
    if found["train"] is None and found["val"] is None:
        return {"": _pairs(root, "images", _masks_folder(root, ""))}, frozenset()
    missing = [split for split, name in found.items() if name is None]
    if missing:
        raise UserError(f"--data {str(root)!r} has no {missing[0]} folder. {_EXPECTED}")
    return {s: _pairs(root, f"{n}/images", _masks_folder(root, f"{n}/")) for s, n in found.items()}, frozenset()


def _masks_folder(root: Path, below: str) -> str:
    found = next((name for name in _MASKS if (root / below / name).is_dir()), None)
    if found is None:
        listing = sorted(p.name for p in (root / below).iterdir())[:6]
        raise UserError(f"no masks in {str(root / below)!r}, only {', '.join(listing) or 'nothing'}. {_EXPECTED}")
    return below + found


def _pairs(root: Path, images: str, masks: str) -> list[tuple[str, str]]:
    for folder in (images, masks):
        if not (root / folder).is_dir():
            raise UserError(f"no folder {str(root / folder)!r}. {_EXPECTED}")
    by_stem = {Path(name).stem: name for name in sorted(os.listdir(root / masks)) if name[0] != "."}
    names = [n for n in sorted(os.listdir(root / images)) if Path(n).suffix.lower() in SUFFIXES and n[0] != "."]
    bare = [name for name in names if Path(name).stem not in by_stem]
    if not names:
        raise UserError(f"no images in {str(root / images)!r}. {_EXPECTED}")
    if bare:
        raise UserError(
            f"{len(bare)} of {len(names)} images in {images!r} have no mask in {masks!r}, first {bare[0]!r}"
        )
    return [(f"{images}/{name}", f"{masks}/{by_stem[Path(name).stem]}") for name in names]


def _voc(root: Path, split: Split) -> list[tuple[str, str]]:
    listed = root / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not listed.is_file():
        raise UserError(f"no file {str(listed)!r}. {_EXPECTED}")
    stems = listed.read_text().split()
    found = [(f"JPEGImages/{stem}.jpg", f"SegmentationClass/{stem}.png") for stem in stems]
    gone = [name for pair in found for name in pair if not (root / name).is_file()]
    if not found or gone:
        raise UserError(f"{str(listed)!r} lists {'missing files, first ' + gone[0] if gone else 'no files'}")
    return found


def _classes(
    root: Path, pairs: Mapping[str, Sequence[tuple[str, str]]], ignored: frozenset[int]
) -> tuple[dict[int, int], tuple[str, ...]]:
    """The class of each number, and the names."""
    seen = _seen(root, [pair for files in pairs.values() for pair in files])
    for number in ignored:
        seen.pop(number, None)
    listed = root / "classes.txt"
    named = _named(listed) if listed.is_file() else {number: str(number) for number in sorted(seen)}
    for number, mask in seen.items():
        if number not in named:
            raise no_class(mask, number, named)
    if len(named) < 2:
        raise UserError(f"the masks of {str(root)!r} contain {len(named)} class: expected two or more")
    return {number: i for i, number in enumerate(sorted(named))}, tuple(named[number] for number in sorted(named))


def _seen(root: Path, pairs: Sequence[tuple[str, str]]) -> dict[int, str]:
    """The numbers that occur, each with a mask that contains it. Reads the masks before training starts, so that errors
    are reported early; of many masks only a sample."""
    found: dict[int, str] = {}
    for picture, mask in some(pairs):
        path = str(root / mask)
        for number in np.unique(read_mask(path, upright_size(root / picture))).tolist():
            found.setdefault(number, path)
    return found


def _named(listed: Path) -> dict[int, str]:
    """The class names in a file, by number."""
    named: dict[int, str] = {}
    for line in filter(None, map(str.strip, listed.read_text(errors="replace").splitlines())):
        number, _, name = line.partition(" ")
        if not number.isdecimal() or int(number) >= IGNORE_INDEX or int(number) in named:
            raise UserError(f"{str(listed)!r}: expected lines such as `1 cat`, each number once, got {line!r}")
        named[int(number)] = name.strip() or number
    return named
