"""Exchange the attentions of a model slot by slot, and record each decision with its reason."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal

from ..attention import Macs, Spec
from ..errors import UserError, unknown
from ..integrations.slot import Slot, WeightDiff, specs_for, weight_diff
from ..sizes import Size, model_name, size_text
from .breakeven import breakeven, pays_from
from .report import KEPT, LEFT, LEFT_FULL, NOT_CHOSEN, LayerReport

BelowBreakeven = Literal["full", "keep"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The decision about one slot: the spec asked for, the attention now there, and the weights that changed."""

    slot: Slot
    asked: Spec | None
    attention: str
    decision: str
    reason: str
    weights: WeightDiff

    def report(self, before: Macs, after: Macs) -> LayerReport:
        """The row of the report, with the costs of the layer before and after the conversion."""
        asked, grid = None if self.asked is None else str(self.asked), self.slot.grid
        decided = (asked, self.attention, self.decision, self.reason)
        return LayerReport(self.slot.name, str(grid), grid.tokens, *decided, *self.weights, before, after)


def exchange(
    slots: list[Slot],
    attention: str | None,
    layers: str | Iterable[int] | None,
    below_breakeven: BelowBreakeven,
    size: Size,
) -> tuple[list[Exchange], int | None]:
    """Put `attention` into the slots that `layers` selects, where it pays.

    Returns:
        The decision about each slot, and, if `attention` pays in none of them at this `size`, the smallest size at
        which it does.
    """
    if below_breakeven not in ("full", "keep"):
        raise unknown("below_breakeven", str(below_breakeven), ("full", "keep"))
    if not all(slot.grid.patches for slot in slots):
        raise UserError(f"size {size_text(size)} is less than a patch of {model_name(slots[0].model)}")
    if attention is None:
        return [_leave(slot, "unchanged", "no other attention was asked for") for slot in slots], None
    specs, chosen = specs_for(attention, slots), select_layers(layers, len(slots))
    done = [
        _exchange(slot, specs[i], below_breakeven)
        if i in chosen
        else _leave(slot, NOT_CHOSEN, "not among the layers asked for")
        for i, slot in enumerate(slots)
    ]
    left = sum(each.decision in (LEFT, LEFT_FULL) for each in done)
    return done, _pays_from(slots, specs, size) if left and left == sum(not slots[i].fixed for i in chosen) else None


def _exchange(slot: Slot, spec: Spec, below_breakeven: BelowBreakeven) -> Exchange:
    """Put an attention of `spec` into the slot, unless it does not pay there or the slot is fixed."""
    before, was = slot.weights, slot.spec
    if slot.fixed:
        slot.leave_full()
        return Exchange(slot, spec, _present(slot), KEPT, slot.fixed, weight_diff(before, slot))
    ours, rival = slot.make(spec), slot.rival(slot.grid)
    pays, reason = breakeven(ours, slot.grid, rival)
    if pays or below_breakeven == "keep":
        slot.put(ours)
        decision, reason = "unchanged" if was == spec else "converted", reason if pays else f"{reason}, kept as asked"
        return Exchange(slot, spec, str(spec), decision, reason, weight_diff(before, slot))
    slot.leave_full()
    decision = LEFT_FULL if rival is None else LEFT
    return Exchange(slot, spec, _present(slot), decision, reason, weight_diff(before, slot))


def _leave(slot: Slot, decision: str, reason: str) -> Exchange:
    return Exchange(slot, None, _present(slot), decision, reason, weight_diff(slot.weights, slot))


def _present(slot: Slot) -> str:
    """The spec of the attention in a slot, or the class of the model's own."""
    return str(slot.spec or type(slot.attn).__name__)


def _pays_from(slots: list[Slot], specs: list[Spec], size: Size) -> int | None:
    """The smallest size at which any layer would be converted."""
    free = [(slot, spec) for slot, spec in zip(slots, specs, strict=True) if not slot.fixed]
    kinds = {(str(slot.grid), spec): slot for slot, spec in free}  # equal layers are computed once
    found = [pays_from(slot.make(spec), slot.grid, size, slot.rival) for (_, spec), slot in kinds.items()]
    return min((side for side in found if side is not None), default=None)


# Selecting layers by text: `2:`, `:4`, `-2:`, `0,3-5` -----------------------------------------------------------------

_SLICE = re.compile(r"(-?[0-9]+)?:(-?[0-9]+)?")
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_SINGLE = re.compile(r"-?[0-9]+")


def select_layers(layers: str | Iterable[int] | None, count: int) -> frozenset[int]:
    """The selected layers of `count`; None selects all. Ranges such as `3-5` include their end."""
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
