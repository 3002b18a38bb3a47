"""Attending less in place: the model stays what it is, its attention modules are adapted where they stand.

    report = attendless.patch(model, "foveal:keep=0.1")      # a detector, a depth model, anything with a ViT inside
    attendless.unpatch(model)                                # bit for bit what it was

Weights, their names and the model's own code stay; see `adapters`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..backbones import is_backbone
from ..errors import UserError
from ..integrations.discovery import check_module, inside, why_none
from ..integrations.hf_interface import interface as door
from ..integrations.slot import check_reads
from ..integrations.timm_inplace import adapted_modules
from ..integrations.timm_inplace import slots as inplace
from ..sizes import model_name, parse_size, size_text
from ..tokens import parse_tokens
from .exchange import BelowBreakeven, exchange
from .report import Report


def patch(
    model: nn.Module,
    attention: str,
    *,
    tokens: str | None = None,
    layers: str | Iterable[int] | None = None,
    below_breakeven: BelowBreakeven = "full",
    size: int | tuple[int, int] | str | None = None,
) -> Report:
    """Let the attentions inside `model` attend with `attention`, in place; what was found and done is the answer.

    `attention`, `layers` and `below_breakeven` are as in `convert`. `size` is that of the images to come (default: what
    the model was made for): by it is decided whether attending less pays, while a model that takes any size goes on
    taking any. Patching again exchanges what was patched. `tokens` is for models that `convert` rebuilds, not for this.
    """
    check_module(model)
    if tokens is not None and parse_tokens(tokens) is not None:
        raise UserError(
            f"tokens={tokens!r}: {type(model).__name__} is patched in place and its own layers need every token. "
            "Reducing tokens is for models that attendless.convert rebuilds"
        )
    if is_backbone(model):
        raise UserError(
            f"{type(model).__name__} is a model of attendless already: attendless.convert exchanges attentions"
        )
    wanted = None if size is None else parse_size(size)
    slots, left = inside(model, wanted)
    if not slots:
        raise UserError(f"nothing in {type(model).__name__} can be patched: {why_none(model)}")
    seen = wanted or slots[0].size
    if not all(slot.grid.patches for slot in slots):
        raise UserError(f"size {size_text(seen)} is less than a patch of {model_name(model)}")
    rows, pays = exchange(slots, attention, layers, below_breakeven, seen)
    check_reads(slots)
    elsewhere = len(model.state_dict()) - sum(len(slot.weights()) for slot in slots)
    return Report(model_name(model), seen, tuple(rows), elsewhere, pays_from=pays, unserved=tuple(left))


def unpatch(model: nn.Module) -> int:
    """Give every attention that was patched back to itself; how many there were. Nothing else was ever changed."""
    check_module(model)
    found = [module for _, module in adapted_modules(model)]
    inplace.restore(model, found)
    return len(found) + door.close(model)
