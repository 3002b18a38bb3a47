"""Convert a pretrained model to another attention, in a copy and without training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor, nn

from ..attention import Macs
from ..backbones import is_backbone
from ..backbones.weights import start_attentions
from ..errors import UserError
from ..integrations import reducing
from ..integrations.discovery import check_module, exchangeable, find_in_place, find_slots
from ..integrations.rebuild.copying import backbone_copy
from ..integrations.resize import resize
from ..integrations.slot import Slot
from ..integrations.timm_inplace import slots as timm_inplace
from ..integrations.weights import check_finite
from ..sizes import input_size, model_name, parse_size
from ..tokens import parse_tokens
from .exchange import BelowBreakeven, exchange
from .fit import fit_to, fits
from .predictor import predicts, put_predictor
from .presets import PRESETS, preset
from .report import Reduction, Report, difference


def convert(
    model: nn.Module,
    attention: str | None = None,
    *,
    tokens: str | None = None,
    layers: str | Iterable[int] | None = None,
    below_breakeven: BelowBreakeven = "full",
    size: int | tuple[int, int] | str | None = None,
    predictor: str | Path | None = None,
    fit: Tensor | None = None,
    readout: bool | None = None,
) -> nn.Module:
    """Return a copy of `model` with `attention` in its layers, on the tokens that `tokens` leaves.

    timm's `VisionTransformer` and some Hugging Face models are rebuilt as attendless backbones; all others stay what
    they are. docs/support.md lists the supported families.

    Args:
        model: a model of timm, transformers or attendless; it is not changed.
        attention: a spec for every layer, or one per layer: `2xfull/10xfoveal:keep=0.1`; or a preset, `fast`,
            `balanced` or `safe`, which sets `tokens` too, by image size; default: those of the model.
        tokens: spec of a token reducer, such as `tome:r=8`, or `none`; default: that of the model.
        layers: the layers to convert, such as `"2:"` or `"0,3-5"`; default: all.
        below_breakeven: `"full"` leaves a layer with full attention where `attention` does not pay at this size;
            `"keep"` converts it anyway.
        size: input size that the copy is moved to first; default: that of the model.
        predictor: file or name of the trained predictors for attentions that predict their keys.
        fit: a few dozen images as the model takes them, to which `lavit` is fitted, so that it starts close to the
            attention it replaces.
        readout: compute the last layer for the class token alone, if the model's output depends on no other token. The
            outputs are the same up to rounding. Default: only if the result differs from full attention on all tokens,
            so that `convert(model, "full")` stays bit-identical to `model`.

    Returns:
        The converted copy: a `Columnar` or `Pyramid` if the model was rebuilt, otherwise a model of the same class.

    Raises:
        UserError: the model or a spec is not supported, or the weights are not finite.
    """
    converted, _ = convert_with_report(
        model,
        attention,
        tokens=tokens,
        layers=layers,
        below_breakeven=below_breakeven,
        size=size,
        predictor=predictor,
        fit=fit,
        readout=readout,
    )
    return converted


def convert_with_report(
    model: nn.Module,
    attention: str | None = None,
    *,
    tokens: str | None = None,
    layers: str | Iterable[int] | None = None,
    below_breakeven: BelowBreakeven = "full",
    size: int | tuple[int, int] | str | None = None,
    predictor: str | Path | None = None,
    fit: Tensor | None = None,
    readout: bool | None = None,
    check: Tensor | None = None,
    copied: Callable[[nn.Module], nn.Module] | None = None,
) -> tuple[nn.Module, Report]:
    """As `convert`, with a report on every layer.

    Args:
        model, attention, tokens, layers, below_breakeven, size, predictor, fit, readout: as in `convert`.
        check: images on which the outputs of the copy are compared with those of the original.
        copied: makes the copy to convert, so that a caller can share the model's weights; default: `backbone_copy`.

    Returns:
        The converted copy and the report.
    """
    check_module(model)
    check_finite(model.named_parameters(), "the model's weights are damaged")
    converted = backbone_copy(model, in_place=True) if copied is None else copied(model)
    wanted = None if size is None else parse_size(size)
    if wanted is not None and exchangeable(converted):
        resize(converted, wanted)
    if isinstance(attention, str) and attention in PRESETS:
        if tokens is not None:
            raise UserError(f"{attention!r} is a preset, which has its own tokens: give no tokens={tokens!r}")
        attention, tokens = preset(attention, wanted or input_size(converted))
    original = copy.deepcopy(converted) if check is not None or fit is not None else None
    slots = find_slots(converted, wanted)
    before = [slot.total for slot in slots]
    if is_backbone(converted):
        converted.readout = False
    if tokens is not None:
        put_tokens(converted, tokens)
        slots = find_slots(converted, wanted)  # again: layers now have fewer tokens
    seen = slots[0].size if wanted is None else wanted
    done, pays = exchange(slots, attention, layers, below_breakeven, seen)
    if is_backbone(converted):
        converted.check_order()
        start_attentions(converted.blocks, scratch=False)
        changed = bool(converted.tokens) or any(block.attn.name != "full" for block in converted.blocks)
        converted.readout = (changed if readout is None else readout) and not converted.needs_patches()
    else:
        reducing.check(slots)
    if predictor is not None and any(predicts(slot.attn) for slot in slots):
        put_predictor(slots, predictor)
    notes = [fit_to(converted, original, fit)] if fits(slots) else []
    if readout and (why := why_whole(converted)):
        notes.append(f"the last layer is computed for all tokens: {why}")
    costs = zip(done, before, _costs(converted, slots), strict=True)
    report = Report(
        model_name(model),
        seen,
        tuple(each.report(then, now) for each, then, now in costs),
        len(converted.state_dict()) - sum(len(slot.weights) for slot in slots),
        pays_from=pays,
        reduction=Reduction.of(converted) if is_backbone(converted) else Reduction.in_place(converted, slots),
        unserved=() if exchangeable(converted) else tuple(find_in_place(converted)[1]),
        tail=is_backbone(converted) and converted.readout,
        note="; ".join(filter(None, notes)),
    )
    if check is not None and original is not None:
        report = dataclasses.replace(report, difference=difference(original, converted, check))
    return converted, report


def why_whole(model: nn.Module) -> str:
    """Why the last layer cannot be computed for the class token alone; empty if it can."""
    return str(model.needs_patches()) if is_backbone(model) else f"{type(model).__name__} keeps its own layers"


def _costs(model: nn.Module, slots: Sequence[Slot]) -> list[Macs]:
    """The cost of every layer. A backbone counts its layers itself, because one may change the cost of another."""
    if not is_backbone(model):
        return [slot.total for slot in slots]
    found = {row.name: row.macs for row in model.costs()}
    return [found[slot.name] for slot in slots]


def put_tokens(model: nn.Module, tokens: str) -> None:
    """Put a token reducer into a model; raise for a model that requires every token."""
    spec = parse_tokens(tokens)
    if is_backbone(model):
        model.set_tokens(tokens, check=False)
    elif timm_inplace.supports(model):
        timm_inplace.put_tokens(model, spec)
    elif spec is not None:
        missing = (
            ": transformers' attention interface has no place to remove tokens between layers"
            if type(model).__module__.startswith("transformers.")
            else ""
        )
        raise UserError(
            f"tokens={tokens!r}: {type(model).__name__} keeps its own layers, which need every token{missing}. Token "
            "reduction is for timm's VisionTransformer and Eva (DINOv3: vit_small_patch16_dinov3 and others), for the "
            "Hugging Face models that are rebuilt, and for attendless models"
        )
