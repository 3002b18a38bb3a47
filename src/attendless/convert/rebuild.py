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
from ..backbones.columnar import ColumnarHost
from ..backbones.pyramid import Pyramid
from ..errors import UserError, unknown
from . import families, huggingface
from .breakeven import breakeven
from .describe import describe
from .predictor import predicts, put_predictor
from .report import LayerReport, Report, difference
from .resize import as_dict, input_size, resize
from .select import select_layers
from .sites import Site, check_reads, host_sites, specs_for

BelowBreakeven = Literal["full", "keep"]


def convert(
    model: nn.Module,
    attention: str,
    *,
    layers: str | Iterable[int] | None = None,
    below_breakeven: BelowBreakeven = "full",
    size: int | tuple[int, int] | None = None,
    predictor: str | Path | None = None,
) -> Any:
    """A copy of `model` that attends with `attention`.

    `attention` is a spec for every layer, or one per layer: `2xfull/10xfoveal:keep=0.1`. `layers` (`"2:"`, `"0,3-5"`)
    leaves the others as they are. Where attending less cannot pay at this size the layer stays full, unless
    `below_breakeven="keep"`. `size` moves the model to another input size first. `predictor` is the file or name of
    what attentions that predict their keys have learned for this model.
    """
    converted, _ = convert_with_report(
        model, attention, layers=layers, below_breakeven=below_breakeven, size=size, predictor=predictor
    )
    return converted


def convert_with_report(
    model: nn.Module,
    attention: str,
    *,
    layers: str | Iterable[int] | None = None,
    below_breakeven: BelowBreakeven = "full",
    size: int | tuple[int, int] | None = None,
    predictor: str | Path | None = None,
    check: Tensor | None = None,
) -> tuple[Any, Report]:
    """As `convert`, with what was done to every layer. On the images `check`, if given, the outputs are compared."""
    if below_breakeven not in ("full", "keep"):
        raise unknown("below_breakeven", str(below_breakeven), ("full", "keep"))
    host = host_copy(model)
    if size is not None:
        resize(host, to_2tuple(size))
    dense = copy.deepcopy(host) if check is not None else None
    sites = find_sites(host)
    specs, chosen = specs_for(attention, sites), select_layers(layers, len(sites))
    rows = [
        _exchange(site, spec, below_breakeven) if i in chosen else _leave(site)
        for i, (site, spec) in enumerate(zip(sites, specs, strict=True))
    ]
    check_reads(sites)
    if predictor is not None and any(predicts(site.attn) for site in sites):
        put_predictor(sites, predictor)
    inside = sum(len(site.attn.state_dict()) for site in sites)
    report = Report(name_of(model), input_size(host), tuple(rows), len(host.state_dict()) - inside)
    if check is not None and dense is not None:
        report = dataclasses.replace(report, difference=difference(dense, host, check))
    return host, report


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


def exchangeable(model: nn.Module) -> bool:
    """Whether the attentions of `model` can be exchanged as it stands."""
    return isinstance(model, ColumnarHost | Pyramid) or families.supports(model)


def find_sites(host: Any) -> list[Site]:
    return families.sites(host) if families.supports(host) else list(host_sites(host))


def name_of(model: Any) -> str:
    """The name timm built the model by, or its class."""
    return str(as_dict(getattr(model, "pretrained_cfg", None)).get("architecture") or type(model).__name__)


def _take_over(ours: Any, model: Any) -> nn.Module:
    """Copy the weights, and what else travels with a model: device, precision, mode, what is frozen, preprocessing."""
    first = next(model.parameters())
    ours.to(device=first.device, dtype=first.dtype)
    ours.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    for name, value in ours.named_parameters():
        value.requires_grad_(name not in frozen)
    ours.pretrained_cfg = ours.default_cfg = as_dict(getattr(model, "pretrained_cfg", None))
    ours.set_grad_checkpointing(model.grad_checkpointing)
    if hasattr(model, "distilled_training"):
        ours.set_distilled_training(model.distilled_training)
    return ours.train(model.training)


def _exchange(site: Site, spec: Spec, below_breakeven: BelowBreakeven) -> LayerReport:
    """Put an attention of `spec` in its place, unless it does not pay there and need not be."""
    foreign = site.spec is None
    ours = site.make(spec)
    # Where the model's own attention is not full, that is what attending less must beat.
    decision = breakeven(ours, site.grid, site.now if foreign else None)
    verdict, reason = "unchanged" if site.spec == spec else "converted", decision.reason
    if not decision.keep and below_breakeven == "keep":
        reason += ", kept as asked"
    elif not decision.keep:
        if foreign:
            return _leave(site, spec, "left as it was", reason)
        verdict, ours = "left full", site.make(parse("full"))
    weights, before = site.weights(), site.now + site.rest
    state = ours.state_dict()
    kept = {name for name, value in state.items() if name in weights and weights[name].shape == value.shape}
    site.put(ours)
    return LayerReport(
        site.name,
        str(site.grid),
        site.grid.tokens,
        str(spec),
        str(ours.spec),
        verdict,
        reason,
        tuple(sorted(kept)),
        tuple(sorted({name for name, _ in ours.named_parameters()} - kept)),
        tuple(sorted(name for name, value in weights.items() if isinstance(value, nn.Parameter) and name not in kept)),
        before,
        ours.macs(site.grid) + site.rest,
    )


def _leave(site: Site, spec: Spec | None = None, verdict: str = "not chosen", reason: str = "") -> LayerReport:
    """Leave a layer's attention as it stands."""
    macs, now = site.now + site.rest, str(site.spec or type(site.attn).__name__)
    asked, kept = None if spec is None else str(spec), tuple(sorted(site.weights()))
    return LayerReport(
        site.name, str(site.grid), site.grid.tokens, asked, now, verdict, reason, kept, (), (), macs, macs
    )
