"""Slots of Hugging Face's vision towers.

The configuration of a tower names its attentions. `put` registers the specs of all layers of the tower under one name
(`attendless:2xfull/…`) and sets it in the configuration. Nothing else is stored, so transformers' own switch and the
slots always agree.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...attention import Attention, Macs, Spec, expand, join, parse
from ...backbones.cost import weight_macs
from ...sizes import Size
from ..slot import Slot
from . import interface
from .towers import TowerLayer, around
from .towers import find as find_layers


def find(model: nn.Module, size: Size | None = None) -> list[Slot]:
    """Every attention of a vision tower in `model`, for images of `size` (default: the configuration's)."""
    return find_with_refusals(model, size)[0]


def find_with_refusals(model: nn.Module, size: Size | None = None) -> tuple[list[Slot], list[tuple[str, str]]]:
    """As `find`, with the layers whose attention cannot be exchanged, each with the reason."""
    found = find_layers(model, size)
    refused = {(around(name), reason): None for name, reason in found.refused.items()}
    return [_slot(model, layer) for layer in found.layers], list(refused)


def _slot(model: nn.Module, layer: TowerLayer) -> Slot:
    queries = layer.windows * layer.grid.tokens // layer.pooled
    mlp = weight_macs(model.get_submodule(layer.block), queries) - weight_macs(layer.module, queries)
    return Slot(layer.block, layer.grid, model, ByInterface(layer), layer.size, Macs(mlp=mlp), layer.fixed)


class ByInterface:
    """Adapter that sets the attention in the configuration of a tower."""

    def __init__(self, layer: TowerLayer) -> None:
        self.layer = layer
        self._attentions: dict[Spec, Attention] = {}
        self._watches = False

    @property
    def attn(self) -> nn.Module:
        spec = self._specs()[self.layer.index]
        return self.layer.module if spec.name == "full" else self._attention(spec)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.layer.module.state_dict(keep_vars=True)

    def make(self, slot: Slot, spec: Spec) -> Attention:
        return self._attention(spec)

    def put(self, slot: Slot, attention: Attention) -> None:
        if interface.seat_of(self.layer.module) is None:
            interface.watch(slot.model)
            self._watches = True
        self._set(attention.spec)

    def restore(self, slot: Slot) -> None:
        if interface.seat_of(self.layer.module) is None:
            return
        self._set(parse("full"))
        if self._watches and not any(interface.attention_of(module) for module in slot.model.modules()):
            interface.unwatch(slot.model)
            self._watches = False

    def cost(self, slot: Slot, attention: Attention | None) -> Macs:
        attention = attention or self._attention(parse("full"))
        core = self.layer.windows * attention.core_macs(slot.grid) // self.layer.pooled
        return Macs(core, weight_macs(self.layer.module, self.layer.windows * slot.grid.tokens))

    def _specs(self) -> list[Spec]:
        """The specs of all layers of the tower."""
        return expand(interface.attention_of(self.layer.module) or "full", self.layer.depth)

    def _set(self, spec: Spec) -> None:
        specs, seat = self._specs(), interface.seat_of(self.layer.module)
        specs[self.layer.index] = spec
        full = all(each.name == "full" for each in specs)
        name = seat.before if full and seat else interface.register(join(specs))
        self.layer.module.config._attn_implementation_internal = name

    def _attention(self, spec: Spec) -> Attention:
        """The attention of a spec on the layer's own grid, built once: it counts, and does not run."""
        if spec not in self._attentions:
            layer = self.layer
            self._attentions[spec] = interface.core(spec, *layer.heads, layer.grid, turn=layer.family.turn)
        return self._attentions[spec]
