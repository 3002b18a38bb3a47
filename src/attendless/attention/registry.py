"""Attentions by name. Every module of this package registers its own; so can a user's file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from .. import options as specs
from ..errors import UserError, unknown
from ..options import Options, Spec
from ..plugins import enter
from .interface import Attention
from .values import Grid

_ATTENTIONS: dict[str, type[Attention]] = {}
A = TypeVar("A", bound=type[Attention])


def register(cls: A) -> A:
    """Class decorator: make an attention known under its `name`."""
    name = cls.__dict__.get("name")
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum() or name[0].isdigit():
        raise UserError(f"{cls.__name__} needs a class attribute `name`: a word, got {name!r}")
    enter(_ATTENTIONS, name, cls, "attention")
    return cls


def attentions() -> dict[str, type[Attention]]:
    """Every registered attention, by name."""
    return dict(sorted(_ATTENTIONS.items()))


def kinds() -> dict[str, type[Options]]:
    return {name: cls.Options for name, cls in _ATTENTIONS.items()}


def attention_class(name: str) -> type[Attention]:
    if name not in _ATTENTIONS:
        raise unknown("attention", name, _ATTENTIONS)
    return _ATTENTIONS[name]


def parse(text: str | Spec) -> Spec:
    """A spec's text into its name and typed options; errors name what exists."""
    return text if isinstance(text, Spec) else specs.parse(text, kinds())


def expand(text: str, count: int, unit: str = "layers") -> list[Spec]:
    """The spec of each layer (or stage) that a text such as `2xfull/10xfoveal:keep=0.1` names."""
    return _placed(specs.expand(text, count, kinds(), unit))


def named(text: str) -> list[Spec]:
    """Every spec that a text names, however many layers there may be."""
    return specs.named(text, kinds())


def expand_stages(text: str, depths: Sequence[int]) -> list[list[Spec]]:
    """The specs of each stage's layers, for a text such as `window+reduced/window+reduced/full/full`."""
    return [_placed(stage) for stage in specs.expand_stages(text, depths, kinds())]


def _placed(stage: Sequence[Spec]) -> list[Spec]:
    """Specs that mean another thing in a stage's first layers, such as `less:vanilla=4`, become what they mean."""
    return [parse(attention_class(spec.name).in_stage(spec, number)) for number, spec in enumerate(stage)]


def create(spec: str | Spec, dim: int, num_heads: int, *, grid: Grid, **arguments: Any) -> Attention:
    """Build an attention from its spec; `arguments` are those of `Attention`."""
    spec = parse(spec)
    return attention_class(spec.name)(dim, num_heads, grid=grid, options=spec.options, **arguments)
