"""Matching of a data set's classes to a model's: by name, by index, or not at all.

A data set has its own order of classes, and may contain only some of the model's. The names of a model's classes are
those of its training (`train` stores them in the file), ImageNet's if it has as many classes as ImageNet, or unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ..errors import UserError
from ..sizes import image_config

Matched = Literal["by name", "ImageNet", "by index", "in sorted order", "none"]
#: Advice in errors about labels that do not match.
_OTHERWISE = "Rename them or leave them out; --no-labels measures agreement alone"


@dataclasses.dataclass(frozen=True)
class Labels:
    """The model's class for each class of a data set (empty: no labels), and the rule that matched them."""

    classes: tuple[int, ...]
    how: Matched


NO_LABELS = Labels((), "none")


def class_names(model: Any) -> tuple[str, ...]:
    """The class names in timm's `label_names` of a model, or () if there are none."""
    names = tuple(map(str, image_config(model).get("label_names", ())))
    return names if len(names) == getattr(model, "num_classes", 0) else ()


def match_labels(given: Sequence[str], model: Any) -> Labels:
    """Match the classes of a data set to those of a model; a class that does not match raises `UserError`.

    Names come before indices, and indices before the sorted order, which applies only if the model has no class names
    and as many classes as the data set.
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
            f"the images have {len(given)} classes ({_some(given)}) and the model has {count} without names: "
            f"expected as many folders, or folders named by class index. {_OTHERWISE}"
        )
    return Labels(tuple(range(count)), "in sorted order")


def is_index(name: str) -> bool:
    """Whether the name of a folder is a class index. Longer numbers, such as dates, are names."""
    return name.isascii() and name.isdecimal() and len(name.lstrip("0")) <= 5


def _by_index(given: Sequence[str], count: int) -> Labels:
    beyond = [name for name in given if int(name) >= count]
    if beyond:
        raise UserError(
            f"folders are named by class index, but the model has classes 0 to {count - 1}, not {beyond[-1]}. "
            + _OTHERWISE
        )
    return Labels(tuple(map(int, given)), "by index")


def _is_wordnet(name: str) -> bool:
    """Whether a name is a WordNet ID such as n01440764, as in ImageNet."""
    return len(name) == 9 and name[0] == "n" and name[1:].isdecimal()


def _imagenet(model: Any) -> tuple[str, ...]:
    """ImageNet's class names in the model's order, if the model has as many classes as a version of ImageNet."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model)
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()


def _some(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
