"""The attentions of Hugging Face's vision towers as slots, for `patch`: what stands there, the configuration names.

Putting an attention somewhere registers its tower's specs, layer by layer, under one name (`attendless:2xfull/…`), and
lets the configuration say that name. Nothing else is kept, so transformers' own switch and this agree at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...attention import (
    Attention,
    Grid,
    Macs,
    Spec,
    expand,
    join,
    parse,
)
from ...backbones.cost import weight_macs
from ...sizes import Size
from . import interface as door
from .families import Place, around, find


@dataclasses.dataclass
class DoorSlot:
    """A layer of a watched model; see `slots.Slot`."""

    place: Place
    model: nn.Module

    @property
    def stays(self) -> str:
        return self.place.stays

    @property
    def name(self) -> str:
        return self.place.block

    @property
    def grid(self) -> Grid:
        return self.place.grid

    @property
    def size(self) -> Size:
        """The images its tower was made for."""
        return self.place.size

    @property
    def block(self) -> Any:
        return self.model.get_submodule(self.place.block)

    @property
    def attn(self) -> nn.Module:
        return self.place.module

    @property
    def specs(self) -> list[Spec]:
        """Those of all layers of its tower."""
        return expand(door.attention_of(self.place.module) or "full", self.place.of)

    @property
    def spec(self) -> Spec | None:
        found = self.specs[self.place.index]
        return None if found.name == "full" else found

    @property
    def now(self) -> Macs:
        return self.cost(self.make(self.spec or parse("full")))

    @property
    def others(self) -> Macs:
        return Macs(mlp=weight_macs(self.block, self._queries) - weight_macs(self.place.module, self._queries))

    @property
    def _tokens(self) -> int:
        """Of an image."""
        return self.place.windows * self.grid.tokens

    @property
    def _queries(self) -> int:
        return self._tokens // self.place.pooled

    def weights(self) -> dict[str, Tensor]:
        return self.place.module.state_dict(keep_vars=True)

    def fate(self, ours: Attention) -> tuple[set[str], set[str], set[str]]:
        """Its weights stay, whatever computes."""
        return set(self.weights()), set(), set()

    def make(self, spec: Spec) -> Attention:
        return door.core(spec, *self.place.heads, self.grid, turn=self.place.family.turn)

    def put(self, attention: Attention) -> None:
        if door.seat_of(self.place.module) is None:
            door.watch(self.model)
        specs = self.specs
        specs[self.place.index] = attention.spec
        config, seat = self.place.module.config, door.seat_of(self.place.module)
        full = all(spec.name == "full" for spec in specs)
        config._attn_implementation_internal = seat.before if full and seat else door.register(join(specs))

    def fallback(self) -> Attention | None:
        """The model's own."""
        if self.spec is not None:
            self.put(self.make(parse("full")))
        return None

    def standing(self) -> Callable[[], None]:
        return partial(self.put, self.make(self.spec or parse("full")))

    def rival(self, grid: Grid) -> Macs | None:
        return None  # full attention is what it has

    def cost(self, attention: Attention) -> Macs:
        core = self.place.windows * attention.core_macs(self.grid) // self.place.pooled
        return Macs(core, weight_macs(self.place.module, self._tokens))


def slots(model: nn.Module, size: tuple[int, int] | None = None) -> tuple[list[DoorSlot], list[tuple[str, str]]]:
    """The slots in `model`, and the attentions of transformers' that are left, with the reason."""
    found = find(model, size)
    left = {(around(name), reason): None for name, reason in found.left.items()}
    return [DoorSlot(place, model) for place in found.places], list(left)
