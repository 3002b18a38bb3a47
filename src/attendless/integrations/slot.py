"""The places in a model where an attention stands and another can be put."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from ..attention import (
    Attention,
    Grid,
    Macs,
    Spec,
    expand,
    expand_stages,
    parse,
)
from ..backbones import is_backbone
from ..backbones.base import Place, check_order
from ..backbones.block import create_like, frozen_alike
from .timm_blocks import slots as families
from .timm_inplace import slots as inplace


class Slot(Protocol):
    """One layer of a `model`: its `name` there, its `grid`, what its attention costs `now`, and what the `others` in it
    cost."""

    name: str
    grid: Grid
    now: Macs
    others: Macs
    model: nn.Module

    @property
    def block(self) -> Any:
        """The layer's block."""

    @property
    def attn(self) -> nn.Module:
        """The attention that stands here."""

    @property
    def spec(self) -> Spec | None:
        """Its spec, or None while it is the model's own kind."""

    def weights(self) -> dict[str, Tensor]:
        """The state of the attention that stands here, under our names; what is trained in it are `nn.Parameter`s."""

    def make(self, spec: Spec) -> Attention:
        """An attention that fits here, with every weight of the present one that it can use."""

    def put(self, attention: Attention) -> None:
        """Let `attention` stand here from now on."""

    @property
    def stays(self) -> str:
        """Why nothing but what stands here can stand here; empty if something can."""

    def standing(self) -> Callable[[], None]:
        """A way back to what stands here now, whatever is put here in between."""

    def fallback(self) -> Attention | None:
        """What to put where nothing that attends less pays: full attention; None: what stands here now."""

    def rival(self, grid: Grid) -> Macs | None:
        """What attending less must beat here, on a grid; None: full attention."""

    def cost(self, attention: Attention) -> Macs:
        """What `attention` would cost here."""

    def fate(self, ours: Attention) -> tuple[set[str], set[str], set[str]]:
        """The names of weights that would be copied, new and dropped if `ours` were put here."""


@dataclasses.dataclass
class BackboneSlot:
    """A layer of one of our backbones."""

    name: str
    grid: Grid
    now: Macs
    others: Macs
    model: nn.Module

    @property
    def block(self) -> Any:
        return self.model.get_submodule(self.name)

    @property
    def attn(self) -> Attention:
        return self.block.attn

    @property
    def spec(self) -> Spec:
        return self.block.attn.spec

    def weights(self) -> dict[str, Tensor]:
        return self.attn.state_dict(keep_vars=True)

    def make(self, spec: Spec) -> Attention:
        made = frozen_alike(create_like(self.attn, spec, self.grid.whole()), self.attn)
        made.check(self.grid)
        return made

    def put(self, attention: Attention) -> None:
        self.block.attn = attention

    stays = ""

    def standing(self) -> Callable[[], None]:
        return partial(self.put, self.attn)

    def fallback(self) -> Attention:
        return self.make(parse("full"))

    def rival(self, grid: Grid) -> None:
        return None

    def cost(self, attention: Attention) -> Macs:
        return attention.macs(self.grid)

    def fate(self, ours: Attention) -> tuple[set[str], set[str], set[str]]:
        return families.fate(self.weights(), ours)


def exchangeable(model: nn.Module) -> bool:
    """Whether the attentions of `model` can be exchanged as it stands."""
    return is_backbone(model) or families.supports(model) or inplace.supports(model)


def find_slots(model: Any) -> list[Slot]:
    """Every layer of an exchangeable model that attends."""
    if families.supports(model):
        return list(families.slots(model))
    return list(inplace.slots(model) if inplace.supports(model) else backbone_slots(model))


def backbone_slots(backbone: Any) -> list[BackboneSlot]:
    """Every layer of one of our backbones that attends."""
    found = []
    for row in backbone.costs():
        if row.spec is not None:
            now = backbone.get_submodule(row.name).attn.macs(row.grid)
            found.append(BackboneSlot(row.name, row.grid, now, row.macs - now, backbone))
    return found


def specs_for(attention: str, slots: list[Slot]) -> list[Spec]:
    """The spec of every slot: one text for all layers, or parts by layer, or by stage where there are stages."""
    stages: dict[str, int] = {}
    for slot in slots:
        stages[_stage(slot)] = stages.get(_stage(slot), 0) + 1
    if len(stages) == 1:
        return expand(attention, len(slots))
    return [spec for stage in expand_stages(attention, list(stages.values())) for spec in stage]


def check_reads(slots: list[Slot]) -> None:
    """Raise unless every attention finds in the context what it reads."""
    for name, stage in itertools.groupby(slots, key=_stage):
        entered = getattr(slots[0].model.get_submodule(name.rstrip(".")), "carry", None) is not None
        check_order(
            [Place(slot.name, slot.attn, getattr(slot.block, "reducer", None)) for slot in stage], entered=entered
        )


def _stage(slot: Slot) -> str:
    return slot.name.rpartition("blocks.")[0]
