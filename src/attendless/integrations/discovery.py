"""Find the slots of any model, and explain why a model has none."""

from __future__ import annotations

from torch import nn

from ..backbones import is_backbone
from ..errors import UserError
from ..sizes import Size
from .hf_interface import slots as hf_interface
from .rebuild import slots as rebuild
from .slot import Slot
from .timm_blocks import slots as timm_blocks
from .timm_inplace import slots as timm_inplace


def check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"expected a model, a torch.nn.Module, not {type(model).__name__} {model!r}: attendless.open_model builds "
            "one by its name"
        )


def exchangeable(model: nn.Module) -> bool:
    """Whether `convert` exchanges the attentions in a plain copy of `model`, and a file can describe the result."""
    return is_backbone(model) or timm_blocks.supports(model) or timm_inplace.supports(model)


def find_slots(model: nn.Module, size: Size | None = None) -> list[Slot]:
    """Every slot of a model as it is, for images of `size` (default, and always for models with a fixed size: their
    own)."""
    if is_backbone(model):
        return rebuild.find(model, size)
    if timm_blocks.supports(model):
        return timm_blocks.find(model, size)
    return find_in_place(model, size)[0]


def find_in_place(model: nn.Module, size: Size | None = None) -> tuple[list[Slot], list[tuple[str, str]]]:
    """The slots that can be exchanged in place, and the paths of all other attentions, each with the reason."""
    slots, refused = timm_inplace.find_with_refusals(model, size)
    more, others = hf_interface.find_with_refusals(model, size)
    slots += more
    names = {slot.name for slot in slots}
    return slots, [*refused, *((name, why) for name, why in others if name not in names)]


def why_none(model: nn.Module) -> str:
    """Why no attention in `model` can be exchanged in place."""
    if timm_blocks.supports(model):
        return "attendless.convert exchanges its attentions, in a copy"
    reasons = {reason: name for name, reason in reversed(find_in_place(model)[1])}
    found = [f"{name or type(model).__name__}: {reason}" for reason, name in reversed(reasons.items())]
    return "; ".join(found[:3]) or "it holds no attention of a known class"
