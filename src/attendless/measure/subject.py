"""What is measured: a model, and how another process builds it again from plain data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..attention import Attention
from ..backbones import LVViT, Pyramid, is_backbone
from ..backbones.block import take_weights
from ..convert import convert, open_model
from ..convert.source import random_weights
from ..errors import UserError
from ..integrations.discovery import exchangeable, find_slots
from ..integrations.rebuild.architecture import Blueprint, blueprint
from ..integrations.reducing import tokens_of as tokens_in_place
from ..integrations.resize import resize
from ..integrations.slot import specs_for
from ..options import join_texts
from ..sizes import channels, input_size, size_text
from .measurement import made_of
from .memory import Memory, peak_memory


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its attention, and the `module:function` with JSON arguments that builds the same model again.

    `build` is empty if another process cannot build the model. `asked` is the requested
    attention, if any. `notes` are remarks on its measurement.
    """

    model: nn.Module
    attention: str
    build: str = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asked: str | None = None
    notes: tuple[str, ...] = ()

    def memory(self, size: tuple[int, int], *, batch: int, threads: int | None) -> Memory:
        """Its peak memory, measured in a separate process."""
        if not self.build:
            name = type(self.model).__name__
            raise UserError(f"memory was not measured: {name} cannot be built again in a separate process")
        first = next(self.model.parameters())
        return peak_memory(
            self.build,
            self.arguments,
            size=size,
            batch=batch,
            channels=channels(self.model),
            threads=threads,
            device=str(first.device),
            dtype=str(first.dtype).removeprefix("torch."),
        )

    @property
    def label(self) -> str:
        return made_of(self.attention, tokens_of(self.model))

    def left(self) -> Left:
        """The layers that did not receive the attention asked for, because it is not faster there."""
        if self.asked is None:
            return Left()
        slots = find_slots(self.model)
        others = [slot for slot, spec in zip(slots, specs_for(self.asked, slots), strict=True) if slot.spec != spec]
        if not others:
            return Left()
        how = "full" if all(slot.spec is not None for slot in others) else "as they were"
        where = size_text(input_size(self.model))
        return Left(len(others), f"{len(others)} of {len(slots)} layers left {how} at {where} px")


@dataclasses.dataclass(frozen=True)
class Left:
    """The number of layers that were not changed, and the same as text."""

    count: int = 0
    words: str = ""


def named(model: str, attention: str | None = None, tokens: str | None = None, **opening: Any) -> Subject:
    """A model opened by its name or file, as it is or with attention and tokens as asked; `opening` goes to
    `open_model`.

    Another process opens an unconverted model again by name. A converted one is described as it is, so that which
    layers keep full attention is decided once.
    """
    opened = open_model(model, attention=attention, tokens=tokens, **opening)
    random = random_weights(model, weights=opening.get("weights"), pretrained=opening.get("pretrained", False))
    notes = ("the weights are random: suitable for timing only",) if random else ()
    if attention is not None or tokens is not None:
        return dataclasses.replace(described(opened), asked=attention, notes=notes)
    again = {"model": str(model), **opening}
    return Subject(opened, attention_of(opened), "attendless.convert:open_model", again, notes=notes)


def described(model: nn.Module) -> Subject:
    """A model given as an object."""
    attention = attention_of(model)
    try:
        plan = blueprint(model)
    except UserError:
        return Subject(model, attention)
    return Subject(model, attention, f"{__name__}:rebuild", {"plan": plan.as_dict(), "timms": not converted(model)})


def converted(model: nn.Module) -> bool:
    """Whether any attention in a model is one of attendless."""
    return any(isinstance(module, Attention) for module in model.modules())


def attention_of(model: nn.Module) -> str:
    """The attention of a model's layers, in the shortest text; timm's other attentions by their class name."""
    if isinstance(model, VisionTransformer) and not converted(model):
        return "full"
    if is_backbone(model):
        return str(model.attention)
    if exchangeable(model):
        return join_texts([str(slot.spec or f"timm's {type(slot.attn).__name__}") for slot in find_slots(model)])
    specs = [str(module.spec) for module in model.modules() if isinstance(module, Attention)]
    return join_texts(specs) if specs else "its own"


def tokens_of(model: nn.Module) -> str:
    """The spec of a model's token reducer; empty if there is none."""
    return model.tokens if is_backbone(model) else tokens_in_place(model)


def rebuild(plan: dict[str, Any], timms: bool) -> nn.Module:
    """The model of a blueprint, or timm's model behind it. Every weight is written, so that all memory is resident."""
    found = Blueprint.from_dict(plan)
    model = _timms(found) if timms else found.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def original(model: nn.Module) -> nn.Module:
    """The baseline of a converted model, with the weights both share.

    It is the timm model, with its own fused attention, that the given one was converted from. A hierarchical model or
    an LV-ViT of attendless, which has no counterpart in timm, is compared with itself under full attention.
    """
    if not converted(model):
        raise UserError(f"{type(model).__name__} was not converted by attendless: give the baseline as like=")
    if isinstance(model, Pyramid | LVViT):
        return convert(model, "full", tokens="none")
    baseline = _timms(blueprint(model))
    take_weights(baseline, model.state_dict())
    first = next(model.parameters())
    return baseline.to(first.device, first.dtype).eval()


def _timms(plan: Blueprint) -> nn.Module:
    if plan.description.host == "timm":
        return dataclasses.replace(plan, attention=(None,) * len(plan.attention)).build()
    return plan.description.original()


def resized(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """A copy of another input size; the given model is left as it is."""
    model = copy.deepcopy(model)
    resize(model, size)
    return model


def images_for(model: nn.Module, size: tuple[int, int], batch: int) -> Tensor:
    """Noise, the same for every variant."""
    first = next(model.parameters())
    noise = torch.randn(batch, channels(model), *size, generator=torch.Generator().manual_seed(0))
    return noise.to(first.device, first.dtype)
