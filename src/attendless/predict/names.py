"""What classes are called: as their file says, or as ImageNet does where there are as many."""

from __future__ import annotations

from collections.abc import Sequence

from timm.data import ImageNetInfo, infer_imagenet_subset


def names_of(given: Sequence[str], classes: int) -> tuple[str, ...]:
    """A name for each of a model's classes. WordNet's numbers (n01440764) become words."""
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
