"""Exchanging the attentions of a model, slot by slot: each decision with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ..attention import Attention, Spec
from ..errors import unknown
from ..integrations.slot import Slot, specs_for
from .breakeven import breakeven, pays_from
from .report import (
    KEPT,
    LEFT,
    LEFT_FULL,
    NOT_CHOSEN,
    LayerReport,
)
from .select import select_layers

BelowBreakeven = Literal["full", "keep"]


def exchange(
    slots: list[Slot],
    attention: str | None,
    layers: str | Iterable[int] | None,
    below_breakeven: BelowBreakeven,
    size: tuple[int, int],
) -> tuple[list[LayerReport], int | None]:
    """Put `attention` where it pays, in the slots that `layers` names.

    What was done to each; and, if what was asked for pays nowhere at this `size`, the smallest one at which it does.
    """
    if below_breakeven not in ("full", "keep"):
        raise unknown("below_breakeven", str(below_breakeven), ("full", "keep"))
    if attention is None:
        return [_leave(slot, None, "unchanged", "no other attention was asked for") for slot in slots], None
    specs, chosen = specs_for(attention, slots), select_layers(layers, len(slots))
    rows = [
        _exchange(slot, specs[i], below_breakeven)
        if i in chosen
        else _leave(slot, None, NOT_CHOSEN, "not among the layers asked for")
        for i, slot in enumerate(slots)
    ]
    left = sum(row.decision in (LEFT, LEFT_FULL) for row in rows)
    return rows, _pays_from(slots, specs, size) if left and left == sum(not slots[i].stays for i in chosen) else None


def _exchange(slot: Slot, spec: Spec, below_breakeven: BelowBreakeven) -> LayerReport:
    """Put an attention of `spec` in its place, unless it does not pay there and need not be."""
    if slot.stays:
        return _put(slot, spec, slot.fallback(), KEPT, slot.stays)
    ours, rival = slot.make(spec), slot.rival(slot.grid)
    decision = breakeven(ours, slot.grid, rival)
    verdict, reason = "unchanged" if slot.spec == spec else "converted", decision.reason
    if decision.keep:
        return _put(slot, spec, ours, verdict, reason)
    if below_breakeven == "keep":
        return _put(slot, spec, ours, verdict, f"{reason}, kept as asked")
    return _put(slot, spec, slot.fallback(), LEFT_FULL if rival is None else LEFT, reason)


def _put(slot: Slot, asked: Spec, ours: Attention | None, verdict: str, reason: str) -> LayerReport:
    if ours is None:
        return _leave(slot, asked, verdict, reason)
    before, after = slot.now + slot.others, slot.cost(ours) + slot.others
    copied, new, dropped = (tuple(sorted(names)) for names in slot.fate(ours))
    slot.put(ours)
    grid, tokens, spec = str(slot.grid), slot.grid.tokens, str(ours.spec)
    return LayerReport(slot.name, grid, tokens, str(asked), spec, verdict, reason, copied, new, dropped, before, after)


def _leave(slot: Slot, spec: Spec | None, verdict: str, reason: str) -> LayerReport:
    """Leave a layer's attention as it stands."""
    macs, now = slot.now + slot.others, str(slot.spec or type(slot.attn).__name__)
    asked, kept = None if spec is None else str(spec), tuple(sorted(slot.weights()))
    return LayerReport(
        slot.name, str(slot.grid), slot.grid.tokens, asked, now, verdict, reason, kept, (), (), macs, macs
    )


def _pays_from(slots: list[Slot], specs: list[Spec], size: tuple[int, int]) -> int | None:
    """The smallest size at which any layer would be converted, when at this one none was."""
    free = [(slot, spec) for slot, spec in zip(slots, specs, strict=True) if not slot.stays]
    kinds = {(str(slot.grid), spec): slot for slot, spec in free}  # layers that are alike
    found = [pays_from(slot.make(spec), slot.grid, size, slot.rival) for (_, spec), slot in kinds.items()]
    return min((side for side in found if side is not None), default=None)
