"""Candidate models that share the baseline's weights.

A search builds dozens of variants of one model. The variants own their modules and share every tensor that is equal to
the baseline's, so a variant costs almost no memory, and no variant has warmer weights than another in a benchmark. No
function here changes the model it is given.
"""

from __future__ import annotations

import copy
import dataclasses
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from ..attention import Spec
from ..convert import convert
from ..convert.conversion import convert_with_report
from ..integrations.discovery import find_slots
from ..integrations.rebuild.copying import backbone_copy
from ..tokens import NONE

M = TypeVar("M", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Change:
    """How a candidate differs from the model.

    attention: the attention spec of every layer, as `convert` takes it.
    layers: the layers whose attention changes; the spec of any other layer has no effect.
    tokens: the spec of the token reducer; empty: the model's own reducer, if any, stays.
    readout: whether the model is converted although attention and tokens stay: the same function, with a
        class-token-only last layer or other exact changes where the model has them. Every other change includes these.
    """

    attention: str
    layers: tuple[int, ...] = ()
    tokens: str = ""
    readout: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers or self.tokens or self.readout)

    def __str__(self) -> str:
        changed = f"{self.attention} in layers {', '.join(map(str, self.layers))}" if self.layers else ""
        last = "exact conversion" if self.readout else ""
        return " with ".join(filter(None, (changed, self.tokens, last))) or self.attention

    def convert(self, model: nn.Module) -> nn.Module:
        """A copy of `model` with this change and weights of its own."""
        return convert(model, **self._arguments()) if self else backbone_copy(model)

    def build(self, backbone: nn.Module) -> nn.Module:
        """`backbone` with this change, sharing its weights. `backbone` is a model whose attentions can be exchanged."""
        if not self:
            return shared_copy(backbone)
        made, _ = convert_with_report(backbone, **self._arguments(), copied=shared_copy)
        return share_weights(made, backbone)

    def _arguments(self) -> dict[str, Any]:
        """The keyword arguments of `convert`. The search decides by its own measurements whether a change pays."""
        return {
            "attention": self.attention if self.layers else None,
            "layers": self.layers or None,
            "tokens": self.tokens or None,
            "readout": True if self.readout else None,
            "below_breakeven": "keep",
        }


def shared_copy(model: M) -> M:
    """A copy of `model` with modules of its own and the model's parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def share_weights(model: M, baseline: nn.Module) -> M:
    """Replace each parameter of `model` that equals the baseline's parameter of the same name with that parameter."""
    theirs = dict(baseline.named_parameters())
    for prefix, module in model.named_modules():
        for name, ours in module._parameters.items():
            same = theirs.get(f"{prefix}.{name}" if prefix else name)
            if ours is not None and same is not None and ours is not same and torch.equal(ours, same):
                module._parameters[name] = same
    return model


def with_attention(backbone: M, layer: int, spec: Spec) -> M:
    """`backbone` with the attention of one layer replaced, sharing its weights."""
    made = shared_copy(backbone)
    slot = find_slots(made)[layer]
    slot.put(slot.make(spec))
    return share_weights(made, backbone)


def with_tokens(backbone: M, tokens: str | Spec) -> M:
    """A light view of one of our backbones whose tokens are reduced by `tokens`.

    The view owns the modules that hold a reducer (the blocks) and their parents; it shares all other modules. A search
    makes thousands of views, so a view must cost less than a `shared_copy`.
    """
    view: Any = _reducer_view(backbone)
    view.set_tokens(tokens or NONE)
    return view


def _reducer_view(module: M) -> M:
    """A copy of `module` if the module or one of its descendants holds a reducer; otherwise `module` itself."""
    changed = {
        name: view
        for name, child in module._modules.items()
        if child is not None and (view := _reducer_view(child)) is not child
    }
    holds = "reducer" in vars(module) or "reducer" in module._modules
    return _shallow_copy(module, changed) if changed or holds else module


def _shallow_copy(module: M, children: dict[str, nn.Module]) -> M:
    """A copy of one module whose registries (children, hooks) are its own, with some children replaced."""
    made = copy.copy(module)
    vars(made).update({name: value.copy() for name, value in vars(module).items() if isinstance(value, dict)})
    made._modules.update(children)
    return made
