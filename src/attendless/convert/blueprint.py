"""How to build a model again, whatever its kind: a description, and the attention of every layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import timm

from ..attention import parse
from ..errors import UserError
from .describe import Description, describe, describes, differences
from .rebuild import exchangeable, find_sites, name_of
from .resize import input_size, resize


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """`attention` has the spec of every layer, or None where a model of timm's keeps its own."""

    description: Description
    attention: tuple[str | None, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.description), "attention": list(self.attention)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Blueprint:
        return cls(Description(str(found["host"]), dict(found["arguments"])), tuple(found["attention"]))

    def build(self) -> Any:
        """The model, its weights yet to be loaded."""
        if self.description.host != "timm":
            return self.description.build([parse(text or "full") for text in self.attention])
        model = _by_name(**self.description.arguments)
        sites = find_sites(model)
        if len(sites) != len(self.attention):
            raise UserError(f"{name_of(model)} has {len(sites)} layers, not {len(self.attention)}")
        for site, text in zip(sites, self.attention, strict=True):
            if text is not None and str(site.spec) != text:
                site.put(site.make(parse(text)))
        return model


def blueprint(model: Any) -> Blueprint:
    """The blueprint of a host, of a timm `VisionTransformer`, or of a model that timm built by its name."""
    if describes(model):
        description = describe(model)
        return Blueprint(description, tuple(str(getattr(b.attn, "spec", "full")) for b in model.blocks))
    name = name_of(model)
    if not timm.is_model(name) or not exchangeable(model):
        raise UserError(
            f"this {type(model).__name__} cannot be saved: a file can describe timm's VisionTransformer, and other "
            "models that attendless converts if they were built by a name timm knows"
        )
    arguments = {"name": name, "num_classes": _classes(model), "size": list(input_size(model))}
    specs = [site.spec for site in find_sites(model)]
    found = Blueprint(Description("timm", arguments), tuple(None if spec is None else str(spec) for spec in specs))
    if wrong := differences(model, found.build()):
        raise UserError(f"this {type(model).__name__} cannot be saved: it is not {name} any more: {wrong[0]}")
    return found


def _by_name(name: str, num_classes: int, size: list[int]) -> Any:
    model = timm.create_model(name, num_classes=num_classes)
    if input_size(model) != tuple(size):
        resize(model, (size[0], size[1]))
    return model


def _classes(model: Any) -> int:
    return int(model.num_classes)
