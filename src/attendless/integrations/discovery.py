"""What attentions there are inside a model that is not rebuilt: those that can be exchanged, and why others cannot."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UserError
from ..sizes import Size
from .hf_interface import slots as door_slots
from .timm_blocks import slots as families
from .timm_inplace import slots as inplace
from .timm_inplace.owners import owners, unserved

PATCH = "attendless.patch lets it attend less as it stands"


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"expected a model, a torch.nn.Module, not {type(model).__name__} {model!r}: attendless.open_model builds "
            "one by its name"
        )


def inside(model: nn.Module, size: Size | None = None) -> tuple[list[Any], list[tuple[str, str]]]:
    """The slots in `model`, for images of `size` (default: what it was made for); and, by name, why others are none."""
    behind, left = door_slots.slots(model, size)
    slots: list[Any] = [*inplace.slots(model, size), *behind]
    named = {slot.name for slot in slots}
    return slots, [*unserved(model, owners(model, size)), *((name, why) for name, why in left if name not in named)]


def why_none(model: nn.Module) -> str:
    """Why no attention in `model` can be exchanged as it stands."""
    if families.supports(model):
        return "attendless.convert exchanges its attentions, in a copy"
    reasons = {reason: name for name, reason in reversed(inside(model)[1])}
    told = [f"{name or type(model).__name__}: {reason}" for reason, name in reversed(reasons.items())]
    return "; ".join(told[:3]) or "it holds no attention of a known class"
