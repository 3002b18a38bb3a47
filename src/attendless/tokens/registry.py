"""Token reducers by name. Every module of this package registers its own; a plug-in file can register more."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from .. import options as specs
from ..errors import UserError
from ..options import Spec
from ..plugins import enter
from .interface import Reducer

#: The spec of no token reduction.
NONE = "none"
_REDUCERS: dict[str, type[Reducer]] = {}
R = TypeVar("R", bound=type[Reducer])


def register_reducer(cls: R) -> R:
    """Class decorator: register a token reducer under its `name`.

    Args:
        cls: The reducer's class.

    Raises:
        UserError: the class has no `name`, another reducer has it, or its search space names an unknown option.
    """
    name = cls.__dict__.get("name")
    if not isinstance(name, str) or not name.isidentifier() or name == NONE:
        raise UserError(f"{cls.__name__} needs a class attribute `name`: a word other than {NONE!r}, got {name!r}")
    if (space := cls.search_space) is not None:
        known = [field.name for field in dataclasses.fields(cls.Options)]
        if wrong := [option for option in (space.schedule, *space.options) if option not in known]:
            raise UserError(f"{cls.__name__}.search_space names {wrong[0]!r}: the options are {', '.join(known)}")
    enter(_REDUCERS, name, cls, "reducer")
    return cls


def reducers() -> dict[str, type[Reducer]]:
    """Every registered reducer, by name."""
    return dict(sorted(_REDUCERS.items()))


def parse_tokens(text: str | Spec) -> Spec | None:
    """Parse `tome:r=8` into its name and typed options, `none` or an empty text into None; errors list what exists."""
    if isinstance(text, Spec):
        return text
    if specs.as_text(text, "token reducer").strip() in ("", NONE):
        return None
    return specs.parse(text, {name: cls.Options for name, cls in _REDUCERS.items()}, "token reducer")


def create_reducers(spec: Spec, dim: int, head_dim: int, depth: int) -> dict[int, Reducer]:
    """Create the token reducers of a model.

    Args:
        spec: Name and options of the reducer.
        dim: Model width.
        head_dim: Width of a head.
        depth: Number of layers.

    Returns:
        The reducer of each layer that has one, by the number of the layer.
    """
    cls = _REDUCERS[spec.name]
    where = cls.layers(spec.options, depth)
    if wrong := [layer for layer in where if not 0 <= layer < depth]:
        raise UserError(f"reducer {spec}: there is no layer {wrong[0]}, the model's are 0 to {depth - 1}")
    return {layer: cls(dim, head_dim, spec.options, layer=layer, depth=depth) for layer in where}
