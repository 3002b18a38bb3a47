"""Warning at the start of training if the attention is not faster at this image size."""

from __future__ import annotations

from typing import Any

from ..convert.breakeven import breakeven
from ..integrations.discovery import exchangeable, find_slots
from ..sizes import size_text


def slower(model: Any, size: tuple[int, int]) -> str:
    """A warning if layers of `model` are not faster than full attention at this size on this machine, or ''."""
    if not exchangeable(model):
        return ""
    ours = [slot for slot in find_slots(model) if slot.spec is not None and slot.spec.name != "full"]
    decisions = [(str(slot.spec), breakeven(slot.attn, slot.grid)) for slot in ours]
    losing = [(spec, decision.reason) for spec, decision in decisions if not decision.keep]
    if not losing:
        return ""
    spec, reason = losing[0]
    return (
        f"warning: at {size_text(size)} px {len(losing)} of the {len(ours)} layers with efficient attention are not "
        f"faster than full attention, the first with {spec} ({reason}). Training continues; larger images may change "
        "this"
    )
