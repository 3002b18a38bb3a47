"""Attentions by name. Every module of this package registers its own; a plug-in file can register more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from .. import options as specs
from ..errors import UserError, unknown
from ..options import Options, Spec
from ..plugins import enter
from .interface import Attention
from .staged import Staged
from .values import Grid

_ATTENTIONS: dict[str, type[Attention]] = {}
_ALIASES: dict[str, str] = {}
A = TypeVar("A", bound=type[Attention])


def register(cls: A) -> A:
    """Class decorator: register an attention under its `name`.

    Args:
        cls: The attention's class.

    Raises:
        UserError: the class has no `name`, or another attention has it.
    """
    name = cls.__dict__.get("name")
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum() or name[0].isdigit():
        raise UserError(f"{cls.__name__} needs a class attribute `name`: a word, got {name!r}")
    if name in _ALIASES:
        raise UserError(f"attention {name!r} already exists: another name of {_ALIASES[name]!r}")
    enter(_ATTENTIONS, name, cls, "attention")
    return cls


def register_alias(alias: str, name: str) -> None:
    """Accept `alias` wherever the registered `name` is accepted. Specs are always printed with `name`."""
    if alias in _ATTENTIONS or _ALIASES.get(alias, name) != name:
        raise UserError(f"attention {alias!r} already exists: it cannot become another name of {name!r}")
    if name not in _ATTENTIONS:
        raise unknown("attention", name, _ATTENTIONS)
    _ALIASES[alias] = name


def attentions() -> dict[str, type[Attention]]:
    """Every registered attention by name, without aliases."""
    return dict(sorted(_ATTENTIONS.items()))


def aliases() -> dict[str, str]:
    """The registered name for each alias."""
    return dict(sorted(_ALIASES.items()))


def attention_class(name: str) -> type[Attention]:
    """The class registered under a name or an alias."""
    name = _ALIASES.get(name, name)
    if name not in _ATTENTIONS:
        raise unknown("attention", name, _ATTENTIONS)
    return _ATTENTIONS[name]


def parse(text: str | Spec) -> Spec:
    """Parse a spec's text into its name and typed options; errors list the names and options that exist."""
    return _registered(text if isinstance(text, Spec) else specs.parse(text, _kinds()))


def expand(text: str, count: int, unit: str = "layers") -> list[Spec]:
    """The spec of each layer (or stage) that a text such as `2xfull/10xfoveal:keep=0.1` names."""
    return _placed(specs.expand(text, count, _kinds(), unit))


def named(text: str) -> list[Spec]:
    """Every distinct spec that a text names, whatever the number of layers."""
    return list(dict.fromkeys(map(_registered, specs.named(text, _kinds()))))


def expand_stages(text: str, depths: Sequence[int]) -> list[list[Spec]]:
    """The specs of each stage's layers, for a text such as `window+reduced/window+reduced/full/full`."""
    return [_placed(stage) for stage in specs.expand_stages(text, depths, _kinds())]


def create(spec: str | Spec, dim: int, num_heads: int, *, grid: Grid, **arguments: Any) -> Attention:
    """Create an attention layer from its spec.

    Args:
        spec: Name and options, such as `foveal:keep=0.1`.
        dim: Model width.
        num_heads: Number of heads.
        grid: The token grid the layer is created for.
        arguments: Further arguments of `Attention`.
    """
    spec = parse(spec)
    return attention_class(spec.name)(dim, num_heads, grid=grid, options=spec.options, **arguments)


def _kinds() -> dict[str, type[Options]]:
    """The options of each name and alias."""
    return {name: attention_class(name).Options for name in (*_ATTENTIONS, *_ALIASES)}


def _registered(spec: Spec) -> Spec:
    """The same spec under its registered name."""
    return Spec(_ALIASES[spec.name], spec.options) if spec.name in _ALIASES else spec


def _placed(stage: Sequence[Spec]) -> list[Spec]:
    """The spec of each layer of a stage: a spec such as `lavit:vanilla=4` depends on the layer."""
    return [_in_stage(_registered(spec), number) for number, spec in enumerate(stage)]


def _in_stage(spec: Spec, number: int) -> Spec:
    cls = attention_class(spec.name)
    return parse(cls.in_stage(spec, number)) if issubclass(cls, Staged) else spec
