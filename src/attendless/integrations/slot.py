"""A slot: one layer of a model whose attention can be exchanged.

Every integration (`rebuild`, `timm_blocks`, `timm_inplace`, `hf_interface`) finds slots and gives each an `Adapter`,
which knows how to exchange the attention in that kind of model. Everything else works with slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..attention import Attention, Grid, Macs, Spec, expand, expand_stages, parse
from ..attention.fitting import fitted
from ..sizes import Size


class Adapter(Protocol):
    """How an integration exchanges the attention of one slot."""

    @property
    def attn(self) -> nn.Module:
        """The module that computes the attention: an `Attention`, or the model's own module."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The state of the attention under attendless's names; trained values are `nn.Parameter`s."""

    def make(self, slot: Slot, spec: Spec) -> Attention:
        """Build an attention for the slot, with every weight of the present one that fits."""

    def put(self, slot: Slot, attention: Attention) -> None:
        """Let `attention` compute in the slot."""

    def restore(self, slot: Slot) -> None:
        """Let the model's own attention compute in the slot; full attention, if the model's own is gone."""

    def cost(self, slot: Slot, attention: Attention | None) -> Macs:
        """Count the multiply-accumulates of `attention` in the slot; None: of the model's own attention."""


@dataclasses.dataclass(eq=False)
class Slot:
    """One layer of `model`.

    name: path of the layer's block in `model`
    grid: the tokens that the attention receives, for images of `size`
    others: cost of the block without its attention
    fixed: why the attention cannot be exchanged; empty if it can
    full: whether the model's own attention is full attention
    folds: whether attendless computes the model's own full attention in less time or memory
    costs: the costs counted so far, by attention
    """

    name: str
    grid: Grid
    model: nn.Module
    adapter: Adapter
    size: Size
    others: Macs
    fixed: str = ""
    full: bool = True
    folds: bool = False
    costs: WeakKeyDictionary[nn.Module, Macs] = dataclasses.field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def block(self) -> Any:
        return self.model.get_submodule(self.name)

    @property
    def attn(self) -> Any:
        """The module that computes the attention: an `Attention`, or the model's own module."""
        return self.adapter.attn

    @property
    def spec(self) -> Spec | None:
        """The spec of the attention; None: the model's own."""
        return self.attn.spec if isinstance(self.attn, Attention) else None

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.adapter.weights

    def make(self, spec: Spec) -> Attention:
        return self.adapter.make(self, spec)

    def put(self, attention: Attention) -> None:
        self.adapter.put(self, attention)

    def restore(self) -> None:
        self.adapter.restore(self)

    def leave_full(self) -> None:
        """Let the layer compute what the model did before any conversion."""
        if self.folds:
            self.put(self.make(parse("full")))
        else:
            self.restore()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts the present attention back."""
        attn = self.attn
        return partial(self.put, attn) if isinstance(attn, Attention) else self.restore

    @property
    def now(self) -> Macs:
        """The cost of the present attention, counted once."""
        attn = self.attn
        if attn not in self.costs:
            self.costs[attn] = self.adapter.cost(self, attn if isinstance(attn, Attention) else None)
        return self.costs[attn]

    @property
    def total(self) -> Macs:
        """The cost of the whole block."""
        return self.now + self.others

    def rival(self, grid: Grid) -> Macs | None:
        """The cost on `grid` that an exchange must reduce; None: that of full attention."""
        if self.full or self.spec is not None:
            return None
        return self.now if grid == self.grid else self.adapter.cost(dataclasses.replace(self, grid=grid), None)


class WeightDiff(NamedTuple):
    """Names of weights of an attention that an exchange copied, created and dropped."""

    copied: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]


def weight_diff(before: Mapping[str, Tensor], slot: Slot) -> WeightDiff:
    """Compare the weights that a slot had `before` with those that it has now."""
    after = slot.weights
    if isinstance(slot.attn, Attention):
        before = fitted(slot.attn, before)
    copied = {name for name, value in before.items() if name in after and after[name].shape == value.shape}
    new, dropped = (
        {name for name, value in weights.items() if isinstance(value, nn.Parameter)} - copied
        for weights in (after, before)
    )
    return WeightDiff(*(tuple(sorted(names)) for names in (copied, new, dropped)))


def specs_for(attention: str, slots: list[Slot]) -> list[Spec]:
    """The spec of every slot: `attention` is one text for all layers, or one per layer, or per stage of a hierarchy."""
    stages: dict[str, int] = {}
    for slot in slots:
        stage = slot.name.rpartition("blocks.")[0]
        stages[stage] = stages.get(stage, 0) + 1
    if len(stages) == 1:
        return expand(attention, len(slots))
    return [spec for stage in expand_stages(attention, list(stages.values())) for spec in stage]
