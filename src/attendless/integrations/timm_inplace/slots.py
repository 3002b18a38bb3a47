"""Slots whose attention is exchanged in place, in the model as it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...attention import Attention, Macs, Spec, create, parse
from ...backbones.block import frozen_alike, take_weights
from ...backbones.cost import weight_macs
from ...backbones.probe import replaced
from ...errors import UserError
from ...sizes import Size, input_size
from ...sparse.full import macs as full_macs
from .. import reducing
from ..grid_tracking import TokenGrid
from ..slot import Slot
from ..support import timm_models
from ..user_code import check_projections
from . import bands
from .adapted import Adapted, AdaptedTokens, adapted_modules, put, take_out
from .attentions import adapted_class
from .owners import Site, refused, sites, turn


def supports(model: nn.Module) -> bool:
    """Whether `convert` exchanges the attentions of the model in place: it is such a model, or was patched."""
    return isinstance(model, timm_models("timm_inplace")) or bool(adapted_modules(model))


def find(model: nn.Module, size: Size | None = None) -> list[Slot]:
    """Every attention in `model` that can be exchanged in place, for images of `size` (default: the model's own)."""
    return find_with_refusals(model, size)[0]


def find_with_refusals(model: nn.Module, size: Size | None = None) -> tuple[list[Slot], list[tuple[str, str]]]:
    """As `find`, with the paths of the attentions that cannot be exchanged, each with the reason."""
    wanted = input_size(model) if size is None and isinstance(model, timm_models("timm_inplace")) else size
    found = dict(sites(model, wanted))
    return [_slot(model, path, site) for path, site in found.items()], refused(model, set(found))


def _slot(model: nn.Module, path: str, site: Site) -> Slot:
    module, name = model.get_submodule(path), path.rpartition(".")[0]
    block = model.get_submodule(name)
    mlp = getattr(block, "mlp", nn.Identity())
    entering, leaving = site.entering or site.grid.tokens, site.leaving or site.grid.tokens
    rest = weight_macs(block, entering) - weight_macs(module, entering) - weight_macs(mlp, entering)
    others = Macs(mlp=weight_macs(mlp, leaving), other=rest) + reducing.macs(block, site.grid)
    if not _readable(module):
        check_projections(module, path)
    adapter = InPlace(module, site.owner, site.windows)
    folds = (adapter.adapted.folds and site.folds) or isinstance(block, reducing.Reducing)
    return Slot(name, site.grid, model, adapter, site.size or input_size(site.owner), others, site.fixed, folds=folds)


def _readable(module: Any) -> bool:
    """Whether the projections state their widths and hold floating weights, as adapters such as peft's LoRA do."""
    first = module.qkv if module.qkv is not None else module.q_proj
    weight = next(module.parameters(), None)
    stated = hasattr(first, "in_features") and hasattr(module.proj, "in_features")
    return stated and weight is not None and weight.is_floating_point()


def put_tokens(model: nn.Module, spec: Spec | None) -> None:
    """Put a token reducer into a model whose attentions are exchanged in place; None removes the present one."""
    if spec is None and not reducing.reducing(model):
        return
    found = [(slot, slot.adapter) for slot in find(model) if isinstance(slot.adapter, InPlace)]
    adapters = [adapter for _, adapter in found]
    rows = all(issubclass(adapter.adapted, AdaptedTokens) for adapter in adapters)
    if not found or not rows or len({id(adapter.owner) for adapter in adapters}) > 1:
        raise UserError(f"tokens={str(spec)!r}: the layers of {type(model).__name__} require every token")
    heads, width = adapters[0].heads, adapters[0].width
    head_dim = adapters[0].module.proj.in_features // heads
    reducing.put([slot.block for slot, _ in found], spec, adapters[0].where, width, head_dim)
    for slot, _ in found:
        if isinstance(slot.block, reducing.Reducing) and slot.spec is None:
            slot.put(slot.make(parse("full")))


class InPlace:
    """Adapter that exchanges the class of an attention module."""

    def __init__(self, module: Any, owner: Any, windows: int) -> None:
        self.module, self.owner, self.windows = module, owner, windows
        self.adapted: Any = adapted_class(module)

    @property
    def attn(self) -> nn.Module:
        return self.module.core if isinstance(self.module, Adapted) else self.module

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.module.state_dict(keep_vars=True)

    @property
    def heads(self) -> int:
        return getattr(self.module, "num_heads", None) or self.module.num_attention_heads

    @property
    def width(self) -> int:
        first = self.module.qkv if self.module.qkv is not None else self.module.q_proj
        return first.in_features

    def make(self, slot: Slot, spec: Spec) -> Attention:
        weight = next(self.module.parameters())
        ours: Any = create(
            spec,
            self.width,
            self.heads,
            grid=slot.grid,
            head_dim=self.module.proj.in_features // self.heads,
            projections=False,
            turn=turn(self.owner),
            device=weight.device,
            dtype=weight.dtype,
        )
        if ours.reads:
            raise UserError(
                f"attention {spec} cannot be put into {slot.name}: {type(self.owner).__name__} does not pass on the "
                f"{', '.join(sorted(ours.reads))} it reads"
            )
        if isinstance(self.attn, Attention):
            take_weights(ours, self.attn.state_dict())
            frozen_alike(ours, self.attn)
        return ours

    def put(self, slot: Slot, attention: Attention) -> None:
        if replaced(self.module):
            raise UserError(
                f"the attention in {slot.name} has a `forward` of its own, which would run in place of "
                f"{attention.spec}: delete that attribute first"
            )
        put(self.module, self.adapted, attention, self.where if issubclass(self.adapted, AdaptedTokens) else None)
        bands.put(self.owner)

    def restore(self, slot: Slot) -> None:
        take_out(self.owner, [self.module])

    def cost(self, slot: Slot, attention: Attention | None) -> Macs:
        """The attention counts itself. Positions that are folded into wider queries and keys widen one of its two
        products."""
        module, tokens = self.module, self.windows * slot.grid.tokens
        if attention is None:
            pool = getattr(module, "q_pool", None)
            pooled = 1 if pool is None else pool.stride[0] * pool.stride[1]
            projections = weight_macs(module, tokens) - weight_macs(module.proj, tokens - tokens // pooled)
            core = self.windows * full_macs(slot.grid.tokens, module.proj.in_features) // pooled
            return Macs(core=core, projections=projections)
        pairs, extra = attention.core_macs(slot.grid), attention.extra_macs(slot.grid)
        if attention.name != "full" and hasattr(module, "rel_pos_h"):
            pairs += pairs * (slot.grid.height + slot.grid.width) // (2 * attention.head_dim)
        inside = weight_macs(module.core, tokens) if isinstance(module, Adapted) else 0
        projections = weight_macs(module, tokens) - inside
        return Macs(core=self.windows * pairs, projections=projections, other=self.windows * extra)

    @property
    def where(self) -> TokenGrid:
        """One for all attentions of an owner, and for its blocks."""
        found = [m.where for _, m in adapted_modules(self.owner) if isinstance(m, AdaptedTokens) and "where" in vars(m)]
        found += [block.around for block in reducing.reducing(self.owner)]
        return found[0] if found else TokenGrid(self.owner.patch_embed, self.owner.num_prefix_tokens)
