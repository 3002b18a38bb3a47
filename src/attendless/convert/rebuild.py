"""A pretrained model → the same model attending less. No training; the given model is left as it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..attention import Spec, parse
from ..backbones import is_host
from ..backbones.weights import start_attentions
from ..errors import UserError, unknown
from ..sizes import image_config, input_size, model_name
from ..tokens import parse_tokens
from . import families, huggingface
from .architecture import describe
from .breakeven import breakeven, pays_from
from .predictor import predicts, put_predictor
from .report import LEFT, LEFT_FULL, NOT_CHOSEN, LayerReport, Reduction, Report, difference
from .resize import resize
from .select import select_layers
from .slots import Slot, check_reads, exchangeable, find_slots, specs_for
from .weights import check_finite

BelowBreakeven = Literal["full", "keep"]


def convert(
    model: nn.Module,
    attention: str | None = None,
    *,
    tokens: str | None = None,
    layers: str | Iterable[int] | None = None,
    below_breakeven: BelowBreakeven = "full",
    size: int | tuple[int, int] | None = None,
    predictor: str | Path | None = None,
) -> Any:
    """A copy of `model` that attends with `attention`, on the tokens that `tokens` leaves.

    Without `attention`, or without `tokens`, what the model has of it stays. `tokens` is a reducer's spec, such as
    `tome:r=8`, or `none`. `attention` is a spec for every layer, or one per layer: `2xfull/10xfoveal:keep=0.1`;
    `layers` (`"2:"`, `"0,3-5"`) leaves the others as they are. Where attending less cannot pay at this size the layer
    stays full, unless `below_breakeven="keep"`. `size` moves the model to another input size first. `predictor` is the
    file or name of what attentions that predict their keys have learned for this model.
    """
    converted, _ = convert_with_report(
        model, attention, tokens=tokens, layers=layers, below_breakeven=below_breakeven, size=size, predictor=predictor
    )
    return converted


def convert_with_report(
    model: nn.Module,
    attention: str | None = None,
    *,
    tokens: str | None = None,
    layers: str | Iterable[int] | None = None,
    below_breakeven: BelowBreakeven = "full",
    size: int | tuple[int, int] | None = None,
    predictor: str | Path | None = None,
    check: Tensor | None = None,
) -> tuple[Any, Report]:
    """As `convert`, with what was done to every layer. On the images `check`, if given, the outputs are compared."""
    if below_breakeven not in ("full", "keep"):
        raise unknown("below_breakeven", str(below_breakeven), ("full", "keep"))
    check_finite(model.named_parameters(), "the model's weights are damaged")
    host = host_copy(model)
    if size is not None:
        resize(host, to_2tuple(size))
    dense = copy.deepcopy(host) if check is not None else None
    before = [slot.now + slot.others for slot in find_slots(host)]
    if tokens is not None:
        put_tokens(host, tokens)
    slots = find_slots(host)  # on the tokens that are left
    specs = specs_for(attention, slots) if attention is not None else []
    chosen = select_layers(layers, len(slots)) if attention is not None else frozenset()
    rows = [_exchange(slot, specs[i], below_breakeven) if i in chosen else _leave(slot) for i, slot in enumerate(slots)]
    rows = [dataclasses.replace(row, before=then) for row, then in zip(rows, before, strict=True)]
    check_reads(slots)
    if is_host(host):
        host.check_order()
        start_attentions(host.blocks, scratch=False)
    if predictor is not None and any(predicts(slot.attn) for slot in slots):
        put_predictor(slots, predictor)
    inside = sum(len(slot.attn.state_dict()) for slot in slots)
    reduction = Reduction.of(host) if is_host(host) else None
    report = Report(
        model_name(model), input_size(host), tuple(rows), len(host.state_dict()) - inside, reduction=reduction
    )
    if report.left and len(report.left) == len(chosen):
        report = dataclasses.replace(report, pays_from=_pays_from(slots, specs, report.size))
    if check is not None and dense is not None:
        report = dataclasses.replace(report, difference=difference(dense, host, check))
    return host, report


def put_tokens(host: Any, tokens: str) -> None:
    """Let `tokens` reduce the tokens of a host; a model that keeps timm's own layers can be given none."""
    if is_host(host):
        host.set_tokens(tokens)
    elif parse_tokens(tokens) is not None:
        raise UserError(
            f"tokens={tokens!r}: {type(host).__name__} keeps timm's own layers, which need every token. Reducing "
            "tokens is for timm's VisionTransformer, Hugging Face's, and attendless models"
        )


def host_copy(model: Any) -> Any:
    """A copy of `model`, computing the same, whose attentions can be exchanged."""
    if huggingface.supports(model):
        return huggingface.columnar(model)
    if exchangeable(model):
        return copy.deepcopy(model)
    if isinstance(model, VisionTransformer):
        return _take_over(describe(model).build(), model)
    supported = ["timm's VisionTransformer", "attendless models", *families.NAMES, *huggingface.NAMES]
    raise UserError(f"{type(model).__name__} is not supported. There are: {', '.join(supported)}")


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
    return ours.train(model.training)


def _exchange(slot: Slot, spec: Spec, below_breakeven: BelowBreakeven) -> LayerReport:
    """Put an attention of `spec` in its place, unless it does not pay there and need not be."""
    foreign = slot.spec is None
    ours = slot.make(spec)
    # Where the model's own attention is not full, that is what attending less must beat.
    decision = breakeven(ours, slot.grid, slot.now if foreign else None)
    verdict, reason = "unchanged" if slot.spec == spec else "converted", decision.reason
    if not decision.keep and below_breakeven == "keep":
        reason += ", kept as asked"
    elif not decision.keep:
        if foreign:
            return _leave(slot, spec, LEFT, reason)
        verdict, ours = LEFT_FULL, slot.make(parse("full"))
    weights, before = slot.weights(), slot.now + slot.others
    state = ours.state_dict()
    kept = {name for name, value in state.items() if name in weights and weights[name].shape == value.shape}
    slot.put(ours)
    return LayerReport(
        slot.name,
        str(slot.grid),
        slot.grid.tokens,
        str(spec),
        str(ours.spec),
        verdict,
        reason,
        tuple(sorted(kept)),
        tuple(sorted({name for name, _ in ours.named_parameters()} - kept)),
        tuple(sorted(name for name, value in weights.items() if isinstance(value, nn.Parameter) and name not in kept)),
        before,
        ours.macs(slot.grid) + slot.others,
    )


def _leave(slot: Slot, spec: Spec | None = None, verdict: str = NOT_CHOSEN, reason: str = "") -> LayerReport:
    """Leave a layer's attention as it stands."""
    macs, now = slot.now + slot.others, str(slot.spec or type(slot.attn).__name__)
    asked, kept = None if spec is None else str(spec), tuple(sorted(slot.weights()))
    return LayerReport(
        slot.name, str(slot.grid), slot.grid.tokens, asked, now, verdict, reason, kept, (), (), macs, macs
    )


def _pays_from(slots: list[Slot], specs: list[Spec], size: tuple[int, int]) -> int | None:
    """The smallest size at which any layer would be converted, when at this one none was."""
    kinds = {(str(slot.grid), spec): slot for slot, spec in zip(slots, specs, strict=True)}  # layers that are alike
    found = [
        pays_from(slot.make(spec), slot.grid, size, slot.cost_at if slot.spec is None else None)
        for (_, spec), slot in kinds.items()
    ]
    return min((side for side in found if side is not None), default=None)
