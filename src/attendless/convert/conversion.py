"""A pretrained model → the same model attending less. No training; the given model is left as it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..backbones import is_backbone
from ..backbones.columnar import replaced_outputs
from ..backbones.weights import start_attentions
from ..errors import UserError
from ..integrations.discovery import PATCH, check_module, inside, why_none
from ..integrations.rebuild import hf_weights as huggingface
from ..integrations.rebuild.architecture import Description, describe
from ..integrations.resize import resize
from ..integrations.slot import check_reads, exchangeable, find_slots
from ..integrations.timm_blocks import slots as families
from ..integrations.timm_inplace.owners import NAMES as IN_PLACE
from ..integrations.weights import check_finite
from ..sizes import image_config, input_size, model_name, parse_size
from ..tokens import parse_tokens
from .exchange import BelowBreakeven, exchange
from .fit import fit_to, fits
from .predictor import predicts, put_predictor
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
) -> Any:
    """A copy of `model` that attends with `attention`, on the tokens that `tokens` leaves.

    Without `attention`, or without `tokens`, what the model has of it stays. `tokens` is a reducer's spec, such as
    `tome:r=8`, or `none`. `attention` is a spec for every layer, or one per layer: `2xfull/10xfoveal:keep=0.1`;
    `layers` (`"2:"`, `"0,3-5"`) leaves the others as they are. Where attending less cannot pay at this size the layer
    stays full, unless `below_breakeven="keep"`. `size` moves the model to another input size first. `predictor` is the
    file or name of what attentions that predict their keys have learned for this model. To the images `fit`, a few
    dozen as the model takes them, `lavit` is fitted, so that it starts near the attention it replaces.

    `readout`: compute the last layer for the class token alone, if the model's output depends on no other token. The
    outputs are the same up to rounding. Default: only if the result differs from full attention on all tokens, so that
    `convert(model, "full")` stays bit-identical to `model`.
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
    copied: Callable[[Any], Any] | None = None,
) -> tuple[Any, Report]:
    """As `convert`, with what was done to every layer. On the images `check`, if given, the outputs are compared.

    `copied` makes the copy to convert (default: `backbone_copy`), so that a caller can share the model's weights.
    """
    check_module(model)
    check_finite(model.named_parameters(), "the model's weights are damaged")
    backbone = (copied or backbone_copy)(model)
    if size is not None:
        resize(backbone, parse_size(size))
    dense = copy.deepcopy(backbone) if check is not None or fit is not None else None
    before = [slot.now + slot.others for slot in find_slots(backbone)]
    if is_backbone(backbone):
        backbone.readout = False  # slots count the whole last layer
    if tokens is not None:
        put_tokens(backbone, tokens)
    slots = find_slots(backbone)  # on the tokens that are left
    rows, pays = exchange(slots, attention, layers, below_breakeven, input_size(backbone))
    rows = [dataclasses.replace(row, before=then) for row, then in zip(rows, before, strict=True)]
    check_reads(slots)
    if is_backbone(backbone):
        backbone.check_order()
        start_attentions(backbone.blocks, scratch=False)
        changed = bool(backbone.tokens) or any(block.attn.name != "full" for block in backbone.blocks)
        backbone.readout = (changed if readout is None else readout) and not backbone.needs_patches()
        found = {row.name: row.macs for row in backbone.costs()}
        rows = [dataclasses.replace(row, after=found[row.name]) for row in rows]
    if predictor is not None and any(predicts(slot.attn) for slot in slots):
        put_predictor(slots, predictor)
    notes = [fit_to(backbone, dense, fit)] if fits(backbone) else []
    if readout and (why := why_whole(backbone)):
        notes.append(f"the last layer is computed for all tokens: {why}")
    report = Report(
        model_name(model),
        input_size(backbone),
        tuple(rows),
        len(backbone.state_dict()) - sum(len(slot.attn.state_dict()) for slot in slots),
        pays_from=pays,
        reduction=Reduction.of(backbone) if is_backbone(backbone) else None,
        tail=is_backbone(backbone) and backbone.readout,
        note="; ".join(filter(None, notes)),
    )
    if check is not None and dense is not None:
        report = dataclasses.replace(report, difference=difference(dense, backbone, check))
    return backbone, report


def why_whole(model: Any) -> str:
    """Why the last layer cannot be computed for the class token alone; empty if it can."""
    return str(model.needs_patches()) if is_backbone(model) else f"{type(model).__name__} keeps timm's own layers"


def put_tokens(backbone: Any, tokens: str) -> None:
    """Let `tokens` reduce the tokens of a backbone; a model that keeps timm's own layers can be given none."""
    if is_backbone(backbone):
        backbone.set_tokens(tokens)
    elif parse_tokens(tokens) is not None:
        raise UserError(
            f"tokens={tokens!r}: {type(backbone).__name__} keeps timm's own layers, which need every token. Reducing "
            "tokens is for timm's VisionTransformer, Hugging Face's, and attendless models"
        )


def backbone_copy(model: Any) -> Any:
    """A copy of `model`, computing the same, whose attentions can be exchanged."""
    if huggingface.supports(model):
        return huggingface.columnar(model)
    if exchangeable(model):
        return copy.deepcopy(model)
    if isinstance(model, VisionTransformer):
        return _take_over(_described(model).build(), model)
    if inside(model)[0]:
        raise UserError(f"{type(model).__name__} is not one that convert copies: {PATCH}")
    supported = ["timm's VisionTransformer", "attendless models", *families.NAMES, *IN_PLACE, *huggingface.NAMES]
    raise UserError(f"{type(model).__name__} is not supported: {why_none(model)}. There are: {', '.join(supported)}")


def _described(model: VisionTransformer) -> Description:
    try:
        return describe(model)
    except UserError as error:
        raise UserError(f"{error}; {PATCH}" if inside(model)[0] else str(error)) from None


def _take_over(ours: Any, model: Any) -> nn.Module:
    """Copy the weights, and what else travels with a model: device, precision, mode, what is frozen, preprocessing."""
    first = next(model.parameters())
    ours.to(device=first.device, dtype=first.dtype)
    ours.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    for name, value in ours.named_parameters():
        value.requires_grad_(name not in frozen)
    ours.pretrained_cfg = ours.default_cfg = image_config(model)
    ours.set_grad_checkpointing(model.grad_checkpointing)
    if hasattr(model, "distilled_training"):
        ours.set_distilled_training(model.distilled_training)
    for name in replaced_outputs(model):  # as `deepcopy` does: a bound method is bound to the copy
        setattr(ours, name, copy.deepcopy(vars(model)[name], {id(model): ours}))
    return ours.train(model.training)
