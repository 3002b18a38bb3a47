"""A model's architecture as plain data: the backbone and the constructor arguments that build the model again.

A model does not store its constructor arguments, so `describe` reads them from its modules. It then builds the model
from the description on the meta device, and compares every leaf module, every plain value and every weight's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.layers import DropPath
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ...attention import Attention, Spec, parse
from ...backbones import BBViT, CeiT, Columnar, ColumnarDistilled, DeepViT, LVViT, Pyramid, Stemmed, is_backbone
from ...backbones.class_token_tail import READOUT
from ...backbones.columnar import replaced_outputs
from ...errors import UserError, unknown
from ...sizes import input_size, model_name
from ...tokens import parse_tokens
from ..discovery import exchangeable, find_slots
from ..reducing import tokens_of
from ..resize import resize
from ..timm_inplace import slots as timm_inplace
from .arguments import bbvit, ceit, column, deepvit, layer, pyramid, stemmed

BACKBONES: dict[str, type[nn.Module]] = {
    "columnar": Columnar,
    "columnar_distilled": ColumnarDistilled,
    "lvvit": LVViT,
    "stemmed": Stemmed,
    "deepvit": DeepViT,
    "ceit": CeiT,
    "bbvit": BBViT,
    "pyramid": Pyramid,
}
#: For each class of model: the backbone that it is built as, and the function that reads its arguments.
_READ: dict[type, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    VisionTransformer: ("columnar", column),
    Columnar: ("columnar", column),
    VisionTransformerDistilled: ("columnar_distilled", column),
    ColumnarDistilled: ("columnar_distilled", column),
    LVViT: ("lvvit", stemmed),
    Stemmed: ("stemmed", stemmed),
    DeepViT: ("deepvit", deepvit),
    CeiT: ("ceit", ceit),
    BBViT: ("bbvit", bbvit),
    Pyramid: ("pyramid", pyramid),
}
#: Backbones that have a counterpart in timm.
_TIMMS: dict[str, type[nn.Module]] = {"columnar": VisionTransformer, "columnar_distilled": VisionTransformerDistilled}
#: Backbones that accept `weight_init="skip"`, which skips the random initialisation of weights.
_DRAWN = ("columnar", "lvvit", "stemmed", "deepvit", "ceit", "bbvit")
_ABSENT_IN_EVAL = (nn.Identity, nn.Dropout, DropPath)


@dataclasses.dataclass(frozen=True)
class Description:
    """The name of a backbone (`host`, its key in files) and its constructor arguments, as JSON values."""

    host: str
    arguments: dict[str, Any]

    def build(self, attention: str | list[Spec] = "full") -> nn.Module:
        """Build the model; its weights are undefined until they are loaded."""
        given: Any = attention
        if self.host == "pyramid" and not isinstance(attention, str):
            rest = iter(attention)
            given = [[spec for _, spec in zip(range(depth), rest, strict=False)] for depth in self.arguments["depths"]]
        return self._backbone()(**self._arguments(), attention=given)

    def original(self) -> nn.Module:
        """Build timm's own model, with its fused attention; its weights are undefined until they are loaded."""
        if self.host not in _TIMMS:
            raise UserError(f"the {self.host} backbone has no counterpart in timm")
        return _TIMMS[self.host](**self._arguments())

    def _backbone(self) -> type[nn.Module]:
        if self.host not in BACKBONES:
            raise unknown("backbone", self.host, BACKBONES)
        return BACKBONES[self.host]

    def _arguments(self) -> dict[str, Any]:
        layers = {name: layer(value) for name, value in self.arguments.items() if name.endswith("_layer")}
        skip = {"weight_init": "skip"} if self.host in _DRAWN else {}
        return {**self.arguments, **layers, **skip}


def describes(model: nn.Module) -> bool:
    return type(model) in _READ


def describe(model: Any) -> Description:
    """Describe a timm `VisionTransformer` or an attendless backbone; raise with every part that cannot be described."""
    if not describes(model):
        known = ", ".join(sorted({cls.__name__ for cls in _READ}))
        raise UserError(f"{type(model).__name__} is not supported: expected one of {known}")
    host, arguments = _READ[type(model)]
    description = Description(host, arguments(model))
    specs = [block.attn.spec for block in model.blocks if isinstance(block.attn, Attention)]
    found = differences(model, _empty(description, specs or "full"))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise UserError(f"this {type(model).__name__} cannot be rebuilt: {'; '.join(found[:3])}{more}")
    return description


def _empty(description: Description, attention: str | list[Spec]) -> nn.Module:
    """Build the model on the meta device."""
    try:
        with torch.device("meta"):
            return description.build(attention)
    except RuntimeError:  # timm before 1.0.21 reads values of tensors while it builds
        return description.build(attention)


def differences(model: nn.Module, rebuilt: nn.Module) -> list[str]:
    """List the parts that differ between two models, except weights that an attention adds, and reducers."""
    ours, theirs = _structure(model), _structure(rebuilt)
    added = {name for name in ours if (".attn." in name or ".reducer" in name) and name not in theirs}
    found = [
        f"{name} is {ours.get(name, 'absent')}, rebuilt as {theirs.get(name, 'absent')}"
        for name in sorted((ours.keys() - added) | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    # Values that change the output but are not in a module's repr, such as which half of a GLU is the gate.
    twins = dict(rebuilt.named_modules())
    for name, module in model.named_modules():
        mine, other = _values(module), _values(twins[name]) if name in twins else {}
        found += [
            f"{name}.{key}={mine[key]!r}, rebuilt as {other[key]!r}"
            for key in mine.keys() & other.keys()
            if mine[key] != other[key]
        ]
    return found


def _structure(model: nn.Module) -> dict[str, str]:
    """The repr of every leaf module (type, sizes, eps) except dropout, and every weight's shape."""
    leaves = {name: module for name, module in model.named_modules() if not any(module.children())}
    parts = {name: repr(leaf) for name, leaf in leaves.items() if not isinstance(leaf, _ABSENT_IN_EVAL)}
    shapes = {name: f"shaped {tuple(value.shape)}" for name, value in model.state_dict().items()}
    return parts | shapes


def _values(module: nn.Module) -> dict[str, Any]:
    """A module's public attributes that are plain values."""
    if isinstance(module, _ABSENT_IN_EVAL):
        return {}
    skip = {"training", "grad_checkpointing", "weight_init_mode", "fix_init", "distilled_training", "init_values"}
    plain = (bool, int, float, str, tuple)
    return {k: v for k, v in vars(module).items() if isinstance(v, plain) and k[0] != "_" and k not in skip}


# With the attention of every layer ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A description with the spec of every layer (None: timm's own attention) and of the token reducer, if any;
    `tail`: whether the last layer computes for the class token alone."""

    description: Description
    attention: tuple[str | None, ...]
    tokens: str = ""
    tail: bool = False

    def as_dict(self) -> dict[str, Any]:
        more = {name: value for name, value in (("tokens", self.tokens), (READOUT, self.tail)) if value}
        return {**dataclasses.asdict(self.description), "attention": list(self.attention), **more}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Blueprint:
        description = Description(str(found["host"]), dict(found["arguments"]))
        tail = bool(found.get(READOUT, False))
        return cls(description, tuple(found["attention"]), str(found.get("tokens", "")), tail)

    def build(self) -> nn.Module:
        """Build the model; its weights are undefined until they are loaded."""
        if self.description.host != "timm":
            backbone: Any = self.description.build([parse(text or "full") for text in self.attention])
            backbone.set_tokens(self.tokens)
            backbone.use_tail(self.tail)
            return backbone
        model = _by_name(**self.description.arguments)
        if (tokens := parse_tokens(self.tokens)) is not None:
            timm_inplace.put_tokens(model, tokens)
        slots = find_slots(model)
        if len(slots) != len(self.attention):
            raise UserError(f"{model_name(model)} has {len(slots)} layers, not {len(self.attention)}")
        for slot, text in zip(slots, self.attention, strict=True):
            if text is not None and str(slot.spec) != text:
                slot.put(slot.make(parse(text)))
        return model


def blueprint(model: Any) -> Blueprint:
    """The blueprint of an attendless backbone, a timm `VisionTransformer`, or a model that timm built by its name."""
    if describes(model) and timm_inplace.supports(model):
        raise UserError(
            f"this {type(model).__name__} was patched in place, which no file describes: save what attendless.convert "
            "makes of the model as it was before (attendless.unpatch)"
        )
    if describes(model) and (names := replaced_outputs(model)):
        raise UserError(
            f"this {type(model).__name__} cannot be saved: {' and '.join(names)} was replaced on the instance, which "
            "no file describes. Delete the attribute, or save the state dict"
        )
    if describes(model):
        description = describe(model)
        layers = tuple(str(getattr(block.attn, "spec", "full")) for block in model.blocks)
        tokens, tail = (model.tokens, model.readout) if is_backbone(model) else ("", False)
        return Blueprint(description, layers, tokens, tail)
    name = model_name(model)
    if not timm.is_model(name) or not exchangeable(model) or not hasattr(model, "num_classes"):
        raise UserError(
            f"this {type(model).__name__} cannot be saved: a file can describe timm's VisionTransformer, and other "
            "models that attendless converts if they were built by a name timm knows. Of other models save the weights "
            "(model.state_dict()), and convert the model again after loading them"
        )
    arguments = {"name": name, "num_classes": int(model.num_classes), "size": list(input_size(model))}
    specs = [slot.spec for slot in find_slots(model)]
    texts = tuple(None if spec is None else str(spec) for spec in specs)
    found = Blueprint(Description("timm", arguments), texts, tokens_of(model))
    if wrong := differences(model, found.build()):
        raise UserError(f"this {type(model).__name__} cannot be saved: it is not {name} any more: {wrong[0]}")
    return found


def _by_name(name: str, num_classes: int, size: list[int]) -> nn.Module:
    if not timm.is_model(name):  # timm would fetch `hf-hub:…` and open `local-dir:…`
        raise UserError(f"unknown model {name!r}: expected a name that timm or attendless registers")
    model = timm.create_model(name, num_classes=num_classes)
    if input_size(model) != tuple(size):
        resize(model, (size[0], size[1]))
    return model
