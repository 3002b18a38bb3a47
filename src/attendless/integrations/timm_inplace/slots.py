"""Slots in models that stay what they are: their attentions are adapted where they stand."""

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
    create,
    parse,
)
from ...backbones.block import frozen_alike, take_weights
from ...backbones.cost import weight_macs
from ...errors import UserError
from ...sizes import Size, input_size
from ...sparse.full import macs as full_macs
from . import (
    ADAPTED,
    Adapted,
    AdaptedTokens,
    Where,
    adapted_modules,
    put,
    take_out,
)
from .owners import (
    WHOLE,
    Owner,
    Place,
    joined,
    owners,
    turn,
)


def supports(model: nn.Module) -> bool:
    """Whether the model's attentions are exchanged where they stand: some already were, or it is such a model."""
    return isinstance(model, WHOLE) or bool(adapted_modules(model))


def slots(model: nn.Module, size: Size | None = None) -> list[AdaptedSlot]:
    """Every attention in `model` that can be adapted, for images of `size` (default: what the model was made for)."""
    wanted = input_size(model) if size is None and isinstance(model, WHOLE) else size
    return [_slot(model, owner, place) for owner in owners(model, wanted) for place in owner.places]


@dataclasses.dataclass
class AdaptedSlot:
    name: str
    grid: Grid
    now: Macs
    others: Macs
    model: nn.Module
    owner: Any
    module: Any
    windows: int
    stays: str

    @property
    def block(self) -> Any:
        return self.model.get_submodule(self.name)

    @property
    def size(self) -> Size:
        """The images its owner was made for."""
        return input_size(self.owner)

    @property
    def attn(self) -> nn.Module:
        """Our core, or while there is none the model's own."""
        return self.module.core if isinstance(self.module, Adapted) else self.module

    @property
    def spec(self) -> Spec | None:
        return self.module.spec if isinstance(self.module, Adapted) else None

    def weights(self) -> dict[str, Tensor]:
        return self.module.state_dict(keep_vars=True)

    def fate(self, ours: Attention) -> tuple[set[str], set[str], set[str]]:
        """Its own weights stay; only those of cores come and go."""
        before, own = self.weights(), {f"core.{name}" for name, _ in ours.named_parameters()}
        gone = {name for name in before if name.startswith("core.")} - own
        return before.keys() - gone, own - before.keys(), gone

    def standing(self) -> Callable[[], None]:
        return partial(self.put, self.module.core) if isinstance(self.module, Adapted) else self.restore

    def rival(self, grid: Grid) -> Macs | None:
        return None  # full attention is what it has

    def fallback(self) -> Attention | None:
        """Full attention: our core's, if that is more than the model's own; else the model's own is put back."""
        if ADAPTED[_original(self.module)].folds:
            return self.make(parse("full"))
        self.restore()
        return None

    def make(self, spec: Spec) -> Attention:
        weight = next(self.module.parameters())
        heads = getattr(self.module, "num_heads", None) or self.module.num_attention_heads
        width = self.module.qkv.in_features if self.module.qkv is not None else self.module.q_proj.in_features
        ours: Any = create(
            spec,
            width,
            heads,
            grid=self.grid,
            head_dim=self.module.proj.in_features // heads,
            projections=False,
            turn=turn(self.owner),
            device=weight.device,
            dtype=weight.dtype,
        )
        if ours.reads:
            raise UserError(
                f"attention {spec} cannot stand in {self.name}: {type(self.owner).__name__} does not pass on the "
                f"{', '.join(sorted(ours.reads))} it reads"
            )
        if isinstance(self.attn, Attention):
            take_weights(ours, self.attn.state_dict())
            frozen_alike(ours, self.attn)
        return ours

    def put(self, attention: Attention) -> None:
        adapted: Any = ADAPTED[_original(self.module)]
        put(self.module, adapted, attention, self._where() if issubclass(adapted, AdaptedTokens) else None)
        self.now = _now(self.module, self.grid, self.windows)

    def restore(self) -> None:
        """Give the module back to itself."""
        restore(self.owner, [self.module])
        self.now = _now(self.module, self.grid, self.windows)

    def cost(self, attention: Attention) -> Macs:
        return _cost(self.module, attention, self.grid, self.windows)

    def _where(self) -> Where:
        """One for all attentions of an owner."""
        found = [m.where for _, m in adapted_modules(self.owner) if isinstance(m, AdaptedTokens) and "where" in vars(m)]
        return found[0] if found else Where(self.owner.patch_embed, self.owner.num_prefix_tokens)


def restore(owner: nn.Module, modules: list[Any]) -> None:
    """Give adapted modules back to themselves; once none is left, nobody needs to know where tokens stand."""
    noting = {module.where for module in modules if isinstance(module, AdaptedTokens)}
    for module in modules:
        if isinstance(module, Adapted):
            take_out(module)
    for where in noting - {m.where for _, m in adapted_modules(owner) if isinstance(m, AdaptedTokens)}:
        where.stop()


def _original(module: nn.Module) -> type[nn.Module]:
    return module.original if isinstance(module, Adapted) else type(module)


def _slot(model: nn.Module, owner: Owner, place: Place) -> AdaptedSlot:
    module = owner.model.get_submodule(place.path)
    name = joined(owner.path, place.path.rpartition(".")[0])
    now = _now(module, place.grid, place.windows)
    block = model.get_submodule(name)
    mlp = getattr(block, "mlp", nn.Identity())
    entering, leaving = place.entering or place.grid.tokens, place.leaving or place.grid.tokens
    rest = weight_macs(block, entering) - weight_macs(module, entering) - weight_macs(mlp, entering)
    others = Macs(mlp=weight_macs(mlp, leaving), other=rest)
    return AdaptedSlot(name, place.grid, now, others, model, owner.model, module, place.windows, place.stays)


def _now(module: Any, grid: Grid, windows: int) -> Macs:
    if isinstance(module, Adapted):
        return _cost(module, module.core, grid, windows)
    tokens, pool = windows * grid.tokens, getattr(module, "q_pool", None)
    pooled = 1 if pool is None else pool.stride[0] * pool.stride[1]
    projections = weight_macs(module, tokens) - weight_macs(module.proj, tokens - tokens // pooled)
    return Macs(core=windows * full_macs(grid.tokens, module.proj.in_features) // pooled, projections=projections)


def _cost(module: Any, core: Attention, grid: Grid, windows: int) -> Macs:
    """As the core counts itself; positions folded into wider queries and keys widen one of its two products."""
    pairs, extra = core.core_macs(grid), core.extra_macs(grid)
    if core.name != "full" and hasattr(module, "rel_pos_h"):
        pairs += pairs * (grid.height + grid.width) // (2 * core.head_dim)
    projections = weight_macs(module, windows * grid.tokens) - weight_macs(core, windows * grid.tokens)
    return Macs(core=windows * pairs, projections=projections, other=windows * extra)
