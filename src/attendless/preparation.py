"""Validation of the preprocessing and the classes that a file states.

Saved and exported files describe the preprocessing of their model. The values are used to allocate and to scale
images, so a file with invalid values is refused when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: The longest side of an image, and the most channels and classes.
_SIDE, _CHANNELS, _CLASSES = 2**16, 2**12, 2**24
#: Images are scaled to the input size divided by this, then cropped.
_CROP = (0.05, 20.0)
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random")
_CROPS = ("center", "squash", "border")


def is_count(value: object, most: int, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_list(value: object, good: Callable[[Any], bool], most: int = _CHANNELS) -> bool:
    return isinstance(value, list | tuple) and 0 < len(value) <= most and all(map(good, value))


def _is_size(value: object) -> bool:
    sides = isinstance(value, list | tuple) and len(value) == 3 and all(is_count(side, _SIDE) for side in value)
    return sides and is_count(value[0], _CHANNELS)  # type: ignore[index]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, str) or _is_list(value, _is_text)


#: For each entry of timm's configuration that files keep: what is expected, and whether a value is that.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "architecture": ("a name", _is_text),
    "num_classes": ("a whole number", lambda value: is_count(value, _CLASSES, least=0)),
    "input_size": (f"channels, height and width, at most {_SIDE:,}", _is_size),
    "mean": ("numbers from -1000 to 1000", lambda value: _is_list(value, lambda x: is_number(x, -1e3, 1e3))),
    "std": ("numbers from 1e-6 to 1e6", lambda value: _is_list(value, lambda x: is_number(x, 1e-6, 1e6))),
    "crop_pct": (f"a number from {_CROP[0]:g} to {_CROP[1]:g}", lambda value: is_number(value, *_CROP)),
    "crop_mode": (" or ".join(_CROPS), _CROPS.__contains__),
    "interpolation": (" or ".join(_INTERPOLATIONS), lambda value: _is_text(value) and value in _INTERPOLATIONS),
    "classifier": ("a name or names", _is_texts),
    "first_conv": ("a name or names", _is_texts),
    "label_names": ("names", lambda value: _is_list(value, _is_text, _CLASSES)),
    "longest": (f"a whole number up to {_SIDE:,}", lambda value: is_count(value, _SIDE)),
}


def absurd(found: Mapping[str, Any]) -> str:
    """What is wrong with a file's image configuration; empty if nothing is. None stands for an absent entry."""
    for name, value in found.items():
        expected, good = _EXPECTED.get(name, ("no such entry", lambda value: False))
        if value is not None and not good(value):
            return f"{name}={str(value)[:60]} was found, {expected} expected"
    if len(found.get("mean") or ()) != len(found.get("std") or ()):
        return f"mean has {len(found.get('mean') or ())} numbers and std {len(found.get('std') or ())}"
    return ""
