"""Class names: those in the file, or ImageNet's for a model with as many classes."""

from __future__ import annotations

from collections.abc import Sequence

from timm.data import ImageNetInfo, infer_imagenet_subset


def names_of(given: Sequence[str], classes: int) -> tuple[str, ...]:
    """A name for each class of a model. WordNet IDs (n01440764) are replaced by words."""
    if len(given) == classes and classes:
        return tuple(map(_in_words, given))
    subset = infer_imagenet_subset({"num_classes": classes})
    if subset:
        info = ImageNetInfo(subset)
        return tuple(info.index_to_description(index) for index in range(classes))
    return tuple(f"class {index}" for index in range(classes))


def _in_words(name: str) -> str:
    known = ImageNetInfo() if len(name) == 9 and name[0] == "n" and name[1:].isdecimal() else None
    return known.label_name_to_description(name) if known and name in known.label_names() else name
