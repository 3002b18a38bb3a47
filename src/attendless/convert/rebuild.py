"""A pretrained model → the same model attending less."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..attention import expand
from .describe import describe


def convert(model: nn.Module, attention: str) -> Any:
    """The model rebuilt into our host with `attention`, its weights copied; the given model is left as it is."""
    description = describe(model)
    ours = description.build(expand(attention, description.arguments["depth"]))
    return take_over(ours, model)


def take_over(ours: nn.Module, model: Any) -> nn.Module:
    """Copy every weight whose name and shape fit, and what else travels with a model: device, mode, preprocessing."""
    weights, own = model.state_dict(), ours.state_dict()
    first = next(model.parameters())
    ours.to(device=first.device, dtype=first.dtype)
    fitting = {name: value.clone() for name, value in weights.items() if name in own and own[name].shape == value.shape}
    ours.load_state_dict(fitting, strict=False, assign=True)
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    for name, value in ours.named_parameters():
        value.requires_grad_(name not in frozen)
    for attribute in ("pretrained_cfg", "default_cfg"):
        if hasattr(model, attribute):
            setattr(ours, attribute, getattr(model, attribute))
    ours.set_grad_checkpointing(model.grad_checkpointing)
    return ours.train(model.training)
