"""Which layers to convert, as text: `2:`, `:4`, `-2:`, `0,3-5`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UserError

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")
_RANGE = re.compile(r"(\d+)-(\d+)")
_SINGLE = re.compile(r"-?\d+")


def select_layers(layers: str | Iterable[int] | None, count: int) -> frozenset[int]:
    """The layers chosen among `count`; all of them if nothing is said. Ranges such as `3-5` include their end."""
    if layers is None:
        return frozenset(range(count))
    chosen: set[int] = set()
    for item in layers.split(",") if isinstance(layers, str) else map(str, layers):
        chosen |= _item(item.strip(), count, layers)
    return frozenset(chosen)


def _item(item: str, count: int, given: object) -> set[int]:
    if found := _SLICE.fullmatch(item):
        start, stop = (None if end is None else int(end) for end in found.groups())
        picked = set(range(count)[start:stop])
    elif found := _RANGE.fullmatch(item):
        picked = set(range(int(found[1]), int(found[2]) + 1))
    elif _SINGLE.fullmatch(item):
        picked = {int(item) + count if item.startswith("-") else int(item)}
    else:
        raise UserError(f"layers {given!r} cannot be read: expected such as 2: or :4 or 0,3-5")
    if not picked or not picked <= set(range(count)):
        raise UserError(f"layers {given!r}: {item!r} names none of, or more than, the model's layers 0 to {count - 1}")
    return picked
