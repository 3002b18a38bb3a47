"""Exchange the attentions of a model in place.

    report = attendless.patch(model, "foveal:keep=0.1")      # a detector, a depth model, any model with a ViT inside
    attendless.unpatch(model)                                # bit-identical to the model before

Weights, their names and the model's own code stay; see `integrations.timm_inplace` and `integrations.hf_interface`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..backbones import is_backbone
from ..errors import UserError
from ..integrations.discovery import check_module, find_in_place, why_none
from ..integrations.hf_interface import interface
from ..integrations.slot import Slot
from ..integrations.timm_inplace.adapted import adapted_modules, take_out
from ..sizes import Size, model_name, parse_size
from ..tokens import parse_tokens
from .exchange import BelowBreakeven, Exchange, exchange
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
    """Exchange the attentions inside `model` in place. If one layer raises, the model stays as it was.

    Patching a patched model exchanges the attentions again; `unpatch` restores the model.

    Args:
        model: any module with attentions of timm or transformers in it.
        attention: a spec for every layer, or one per layer: `2xfull/10xfoveal:keep=0.1`.
        tokens: refused unless `none`; token reduction needs a model that `convert` rebuilds.
        layers: the layers to exchange, such as `"2:"` or `"0,3-5"`; default: all.
        below_breakeven: `"full"` leaves a layer as it was where `attention` does not pay; `"keep"` exchanges it.
        size: size of the images to come, for the break-even decision alone; default: the model's own.

    Returns:
        The report: what was found, exchanged and left, with reasons.
    """
    check_module(model)
    if tokens is not None and parse_tokens(tokens) is not None:
        raise UserError(
            f"tokens={tokens!r}: {type(model).__name__} is patched in place and its own layers need every token. "
            "Token reduction is for models that attendless.convert rebuilds"
        )
    if is_backbone(model):
        raise UserError(
            f"{type(model).__name__} is a model of attendless already: attendless.convert exchanges attentions"
        )
    wanted = None if size is None else parse_size(size)
    slots, refused = find_in_place(model, wanted)
    if not slots:
        raise UserError(f"nothing in {type(model).__name__} can be patched: {why_none(model)}")
    seen = wanted or slots[0].size
    before = [slot.total for slot in slots]
    done, pays = _all_or_nothing(slots, attention, layers, below_breakeven, seen)
    rows = tuple(each.report(then, each.slot.total) for each, then in zip(done, before, strict=True))
    elsewhere = len(model.state_dict()) - sum(len(slot.weights) for slot in slots)
    return Report(model_name(model), seen, rows, elsewhere, pays_from=pays, unserved=tuple(refused))


def _all_or_nothing(
    slots: list[Slot],
    attention: str,
    layers: str | Iterable[int] | None,
    below_breakeven: BelowBreakeven,
    size: Size,
) -> tuple[list[Exchange], int | None]:
    """Exchange the attentions; if one slot raises, put back those of all others."""
    snapshots = [slot.snapshot() for slot in slots]
    try:
        return exchange(slots, attention, layers, below_breakeven, size)
    except BaseException:
        for put_back in reversed(snapshots):
            put_back()
        raise


def unpatch(model: nn.Module) -> int:
    """Restore every attention that `patch` exchanged.

    Args:
        model: a model that was given to `patch`.

    Returns:
        The number of attentions that were restored.
    """
    check_module(model)
    found = [module for _, module in adapted_modules(model)]
    take_out(model, found)
    return len(found) + interface.close(model)
