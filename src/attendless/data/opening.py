"""DATA as the command line and Python take it: which folders are understood, and which names.

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

import contextlib
from pathlib import Path

from ..errors import UserError
from .datasets import Cifar, is_cifar, open_named
from .folders import Files, expected, open_folder
from .source import BadImage, Source, Split


def open_data(where: str | Path, split: Split = "val", *, labels: bool = True) -> Source:
    """The images that `where` names. A folder without splits serves whole, whichever split is asked for.

    Without `labels` any folder with pictures somewhere below it will do.
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
    """Training and validation images, and a note on how they were told apart.

    Where a folder has no splits of its own, every `hold_out`-th image is kept for validation.
    """
    train, val = open_data(where, "train"), open_data(where, "val")
    _check_readable(train, where)
    if isinstance(train, Files) and train == val:
        if len(train) < hold_out:
            raise UserError(f"--data {str(where)!r} has no val folder, and too few images to hold some out")
        # Files are sorted by class, so this takes of each class its share.
        held = range(hold_out // 2, len(train), hold_out)
        rest = sorted(set(range(len(train))) - set(held))
        return train.subset(rest), train.subset(held), f"no val folder: every {hold_out}th image is held out"
    return train, val, "the data's own splits"


def _check_readable(source: Source, where: str | Path) -> None:
    """Raise unless there is a picture that can be read; a few that cannot are no reason to stop."""
    for index in range(len(source)):
        with contextlib.suppress(BadImage):
            source[index]
            return
    raise UserError(f"--data {str(where)!r}: none of its {len(source)} images can be read")
