"""The folders and names that `--data` accepts.

    DIR/{train,val}/<class>/…/x.jpg   class names, in sorted order; `valid`, `validation`, `test`, `eval` serve as val
    DIR/<class>/x.jpg                 one set, no splits
    DIR/<class index>/x.jpg           folders named by whole numbers: the number is the label
    DIR/val/images + val_annotations.txt   Tiny-ImageNet's own layout
    DIR/*.bin                         CIFAR's binary version
    DIR/x.jpg, DIR/images/x.jpg       images without labels
    scenes, scenes:size=64            the included data set
    CIFAR10@DIR                       any torchvision classification data set already in DIR

A data set is a `Source`: a length, `source[i] -> (image, label)`, the class names and a name for each image.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..errors import UserError
from .datasets import Cifar, is_cifar, open_named
from .folders import Files, expected, open_folder
from .source import BadImage, Source, Split


def open_data(where: str | Path, split: Split = "val", *, labels: bool = True) -> Source:
    """The images of a folder or data set. A folder without splits returns all images for both splits.

    Args:
        where: Folder, `scenes`, or a torchvision data set as NAME@DIR.
        split: `train` or `val`.
        labels: False accepts any folder with images below it, and ignores class folders.
    """
    text = str(where)
    root = Path(text).expanduser()
    if not text or not root.exists():
        return open_named(text, split)
    if not root.is_dir():
        raise UserError(f"--data {text!r} is a file: expected a folder of images. {expected(root.parent)}")
    if is_cifar(root):
        return Cifar.open(root, split)
    return open_folder(root, split, labels=labels)


def open_splits(where: str | Path, hold_out: int = 10) -> tuple[Source, Source, str]:
    """Training and validation images, and a note on how they were split.

    In a folder without splits, every `hold_out`-th image is held out for validation.
    """
    train, val = open_data(where, "train"), open_data(where, "val")
    _check_readable(train, where)
    if isinstance(train, Files) and train == val:
        if len(train) < hold_out:
            raise UserError(f"--data {str(where)!r} has no val folder, and too few images to hold some out")
        # Files are sorted by class, so every class is held out in proportion.
        held = range(hold_out // 2, len(train), hold_out)
        rest = sorted(set(range(len(train))) - set(held))
        return train.subset(rest), train.subset(held), f"no val folder: every {hold_out}th image is held out"
    return train, val, "the data's own splits"


def _check_readable(source: Source, where: str | Path) -> None:
    """Raise if no image can be read."""
    for index in range(len(source)):
        with contextlib.suppress(BadImage):
            source[index]
            return
    raise UserError(f"--data {str(where)!r}: none of its {len(source)} images can be read")
