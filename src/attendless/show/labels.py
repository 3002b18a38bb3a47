"""Positions of short labels beside the points of a plot without overlaps."""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[float, float]
#: Half the size of a label of two digits, and half that of a point.
LABEL, POINT = (8.0, 6.0), (3.0, 3.0)
#: Candidate offsets of a label from its point: near before far, above before below.
BESIDE = [
    (x * far, y * far)
    for far in (13, 19)
    for x, y in ((0, 1), (0.8, 0.8), (-0.8, 0.8), (1, 0), (-1, 0), (0, -1), (0.8, -0.8), (-0.8, -0.8))
]


def beside(points: Sequence[Place], wanted: Sequence[int], size: Place) -> dict[int, Place]:
    """Offsets of the labels in `wanted` (by priority) from their points, in a plot of this `size`.

    All values are in typographic points. A label without a free position is left out.
    """
    found: dict[int, Place] = {}
    taken: list[Place] = []
    for number in wanted:
        x, y = points[number]
        for dx, dy in BESIDE:
            at = (x + dx, y + dy)
            inside = all(half < place < side - half for place, side, half in zip(at, size, LABEL, strict=True))
            if inside and not any(_meet(at, p, POINT) for p in points) and not any(_meet(at, t, LABEL) for t in taken):
                found[number] = (dx, dy)
                taken.append(at)
                break
    return found


def _meet(label: Place, other: Place, room: Place) -> bool:
    return all(abs(a - b) < half + more for a, b, half, more in zip(label, other, LABEL, room, strict=True))
