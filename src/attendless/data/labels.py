"""Which of a model's classes the pictures of a data set belong to: by name, by index, or not at all.

A data set numbers its classes in its own order, and may hold only some of the model's. A model knows its classes by
the names it was trained with (`train` keeps them in the file), by ImageNet's where it has as many as ImageNet, or by
number alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ..errors import UserError
from ..sizes import image_config

Matched = Literal["by name", "ImageNet", "by index", "in sorted order", "none"]
#: How to go on without labels, said wherever they do not fit.
_OTHERWISE = "Rename them or leave them out; --no-labels measures agreement alone"


@dataclasses.dataclass(frozen=True)
class Labels:
    """For each class of a data set, the model's class (empty: no labels), and how that was found."""

    classes: tuple[int, ...]
    how: Matched


NO_LABELS = Labels((), "none")


def class_names(model: Any) -> tuple[str, ...]:
    """The names a model knows its classes by, where timm's `label_names` says them; else nothing."""
    names = tuple(map(str, image_config(model).get("label_names", ())))
    return names if len(names) == getattr(model, "num_classes", 0) else ()


def match_labels(given: Sequence[str], model: Any) -> Labels:
    """Find the classes of a data set among the model's. One that the model does not know is an error that names it.

    Names count before numbers, and numbers before the order: that is taken only where the model knows no names and
    there are as many classes as it has.
    """
    if not given:
        return NO_LABELS
    known, count = class_names(model), int(getattr(model, "num_classes", 0))
    how: Matched = "by name"
    if not known and all(_is_wordnet(name) for name in given) and (imagenet := _imagenet(model)):
        known, how = imagenet, "ImageNet"
    index = {name: i for i, name in enumerate(known)}
    strange = [name for name in given if name not in index]
    if not strange:
        return Labels(tuple(index[name] for name in given), how)
    if all(map(is_index, given)):
        return _by_index(given, count)
    if known:
        who = "ImageNet" if how == "ImageNet" else "the model"
        raise UserError(
            f"{_some(strange)} {_are(strange)} not among the classes of {who}: {_some(known)}. {_OTHERWISE}"
        )
    if len(given) != count:
        raise UserError(
            f"the images have {len(given)} classes ({_some(given)}) and the model {count}, of which it knows no names: "
            f"expected as many folders, or folders named by class index. {_OTHERWISE}"
        )
    return Labels(tuple(range(count)), "in sorted order")


def is_index(name: str) -> bool:
    """Whether a folder's name is the number of a class. Longer numbers are dates or the like: names as any other."""
    return name.isascii() and name.isdecimal() and len(name.lstrip("0")) <= 5


def _by_index(given: Sequence[str], count: int) -> Labels:
    beyond = [name for name in given if int(name) >= count]
    if beyond:
        raise UserError(
            f"folders are named by class index, and the model's go from 0 to {count - 1}: it has no {beyond[-1]}. "
            + _OTHERWISE
        )
    return Labels(tuple(map(int, given)), "by index")


def _is_wordnet(name: str) -> bool:
    """Whether a name is one of WordNet's, as ImageNet's folders are called: n01440764."""
    return len(name) == 9 and name[0] == "n" and name[1:].isdecimal()


def _imagenet(model: Any) -> tuple[str, ...]:
    """ImageNet's names, in the model's order, where the model has as many classes as a version of ImageNet."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model)
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()


def _some(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
