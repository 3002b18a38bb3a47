"""The places in a model where an attention stands and another can be put."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from torch import Tensor, nn

from ..attention import Attention, Grid, Macs, Spec, expand, expand_stages
from ..backbones.block import create_like
from ..errors import UserError


class Site(Protocol):
    """One layer: its `name` in the model, its `grid`, what its attention costs `now`, and the `rest` of the layer."""

    name: str
    grid: Grid
    now: Macs
    rest: Macs

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


@dataclasses.dataclass
class HostSite:
    """A layer of one of our hosts."""

    name: str
    grid: Grid
    now: Macs
    rest: Macs
    block: Any

    @property
    def attn(self) -> Attention:
        return self.block.attn

    @property
    def spec(self) -> Spec:
        return self.block.attn.spec

    def weights(self) -> dict[str, Tensor]:
        return self.attn.state_dict(keep_vars=True)

    def make(self, spec: Spec) -> Attention:
        return frozen_alike(create_like(self.attn, spec, self.grid), self.attn)

    def put(self, attention: Attention) -> None:
        self.block.attn = attention


def host_sites(host: Any) -> list[HostSite]:
    """Every layer of one of our hosts that attends."""
    found = []
    for row in host.layers():
        if row.spec is not None:
            block = host.get_submodule(row.name)
            now = block.attn.macs(row.grid)
            found.append(HostSite(row.name, row.grid, now, minus(row.macs, now), block))
    return found


def frozen_alike(ours: Attention, theirs: nn.Module) -> Attention:
    """Weights that are frozen in the attention replaced stay frozen."""
    trainable = {name: value.requires_grad for name, value in theirs.named_parameters()}
    for name, value in ours.named_parameters():
        value.requires_grad_(trainable.get(name, True))
    return ours


def minus(total: Macs, part: Macs) -> Macs:
    pairs = zip(dataclasses.astuple(total), dataclasses.astuple(part), strict=True)
    return Macs(*(a - b for a, b in pairs))


def specs_for(attention: str, sites: list[Site]) -> list[Spec]:
    """The spec of every site: one text for all layers, or parts by layer, or by stage where there are stages."""
    stages: dict[str, int] = {}
    for site in sites:
        stages[_stage(site)] = stages.get(_stage(site), 0) + 1
    if len(stages) == 1:
        return expand(attention, len(sites))
    return [spec for stage in expand_stages(attention, list(stages.values())) for spec in stage]


def check_reads(sites: list[Site]) -> None:
    """An attention that reads what the layer before left cannot stand first, nor after one that is not ours."""
    for before, site in zip([None, *sites], sites, strict=False):
        reads = getattr(site.attn, "reads", None)
        if reads and (before is None or before.spec is None or _stage(before) != _stage(site)):
            raise UserError(
                f"attention {site.spec} cannot stand in {site.name}: it reads what a layer before it left "
                f"({', '.join(sorted(reads))})"
            )


def _stage(site: Site) -> str:
    return site.name.rpartition("blocks.")[0]
