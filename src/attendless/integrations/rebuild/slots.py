"""Slots of attendless backbones, whose blocks pass a context from layer to layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from ...attention import Attention, Macs, Spec, parse
from ...backbones import Backbone
from ...backbones.block import create_like, frozen_alike
from ...sizes import Size, input_size
from ..slot import Slot
from ..user_code import check_projections, refuse_user_code


@dataclasses.dataclass(frozen=True)
class BlockAttention:
    """Adapter of a block of an attendless backbone."""

    block: Any

    @property
    def attn(self) -> Attention:
        return self.block.attn

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.attn.state_dict(keep_vars=True)

    def make(self, slot: Slot, spec: Spec) -> Attention:
        check_projections(self.attn, f"{slot.name}.attn")
        made = frozen_alike(create_like(self.attn, spec, slot.grid.whole()), self.attn)
        made.check(slot.grid)
        return made

    def put(self, slot: Slot, attention: Attention) -> None:
        refuse_user_code(self.attn, f"{slot.name}.attn")
        self.block.attn = attention

    def restore(self, slot: Slot) -> None:
        self.put(slot, self.make(slot, parse("full")))

    def cost(self, slot: Slot, attention: Attention | None) -> Macs:
        return (attention or self.attn).macs(slot.grid)


def find(backbone: Backbone, size: Size | None = None) -> list[Slot]:
    """Every attention layer of a backbone, at the backbone's own size."""
    found = []
    for row in backbone.costs():
        if row.spec is not None:
            adapter = BlockAttention(backbone.get_submodule(row.name))
            own = adapter.attn.macs(row.grid)
            slot = Slot(row.name, row.grid, backbone, adapter, input_size(backbone), row.macs - own)
            slot.costs[adapter.attn] = own
            found.append(slot)
    return found
