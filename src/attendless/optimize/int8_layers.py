"""Which layers of an int8 file should be dynamic: those whose calibrated range costs most accuracy per millisecond.

A dynamic layer is quantised at run time, which is more accurate and slower (`export/int8_openvino.py`). For each layer,
the distance from the original's outputs is measured with that layer alone made dynamic. The time that this costs is
proportional to the layer's multiply-accumulates. Layers become dynamic in the order of recovered distance per time.
NNCF's accuracy control returns layers to floating point in the same way, with a metric in place of the distance, which
is known much more precisely from few images.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..export.exporting import floats_of
from ..export.file_model import FileModel
from ..export.int8_openvino import layer_macs, open_dynamic
from .measuring import read_one
from .session import Session
from .variants import Target, Variant

#: Shares of the layers that become dynamic, one variant for each.
_SHARES = (1 / 8, 1 / 4)
#: The share of the budget for measuring single layers, and the images to measure on.
_BUDGET, _LEAST, _MOST = 0.04, 8, 64
#: The share of the budget above which single layers are not measured.
_TOO_LONG = 0.15


def mixed_targets(session: Session, target: Target) -> list[Target]:
    """Targets that differ from an int8 target by dynamic layers, few first."""
    variant = Variant(session.original.change, target)
    found = session.search.log.get(f"distance by layers of {variant}", partial(_measure, session, variant))
    order = sorted((gain / macs, name) for name, gain, macs in found if gain > 0)
    names = [name for _, name in reversed(order)]
    counts = sorted({max(1, round(share * len(found))) for share in _SHARES if names})
    return [Target(target.runtime, "int8", tuple(sorted(names[:count]))) for count in counts]


def _measure(session: Session, variant: Variant) -> list[tuple[str, float, int]]:
    """For each layer: its name, how much of the distance it recovers, and its multiply-accumulates. Empty if measuring
    would take too much of the budget."""
    assert variant.source is not None
    file, original = session.workshop.file(variant), session.workshop.file(variant.source)
    macs = layer_macs(file)
    speedup = session.comparisons[variant].ratio
    seconds = len(macs) * session.original_ms / 1e3 / speedup
    if _LEAST * seconds > _TOO_LONG * session.deadline.budget:
        session.notes.append(f"int8 was not measured layer by layer, which would take {_LEAST * seconds:.0f} s")
        return []
    count = int(max(_LEAST, min(_MOST, _BUDGET * session.deadline.budget / seconds)))
    images, belief = session.images[:count], session.belief[:count]
    floats = floats_of(variant.target.format, "int8")
    about = session.workshop.describe(variant)

    def distance(names: list[str]) -> float:
        run = FileModel(open_dynamic(file, original, names, floats), about)
        return read_one(run, images, belief, str(variant), lambda done: None, _nothing, session.uncalibrated.distance)[
            1
        ]

    whole, found = distance([]), list[tuple[str, float, int]]()
    with session.search.progress(f"measuring int8 layer by layer on {count} images", len(macs)) as step:
        for name, cost in macs.items():
            found.append((name, whole - distance([name]), cost))
            step(1)
    return found


def _nothing(outputs: Tensor, original: Tensor, part: slice) -> list[object]:
    return []
