"""attendless attentions behind transformers' attention switch, in the model as it is.

    attendless.patch(model, "foveal:keep=0.1")                        # with a report
    model.set_attn_implementation("sdpa")                             # back, and forth again, with transformers' switch
    model.set_attn_implementation("attendless:foveal:keep=0.1")
    model.set_attn_implementation(attendless.huggingface.register("foveal:keep=0.25"))

transformers' models pass q, k and v to a function that is registered in `AttentionInterface` under a name. The name of
an attendless attention is `attendless:` and its spec. The name must be registered before it is set. The model must be
watched (`watch`; `patch` does it) before it runs, because the function receives no grid.

Attentions that are not self-attention of a vision tower (text, masked, causal and cross attention) run in PyTorch's
fused kernel, as they do by default.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Attention, Context, Grid, Spec, attention_class, create, expand, named
from ...errors import UserError
from ...sizes import Size
from ..grid_tracking import Watch
from ..packed_sizes import PackedSizes
from ..support import Family, hf_family
from ..token_order import Segment
from . import towers

PREFIX = "attendless:"
#: Attribute of an attention module that holds its `Seat`.
_MARK = "_attendless_seat"
#: Arguments with which an attention is not softmax(q kᵀ) v, unless they are None.
_OTHERWISE = ("position_bias", "softcap", "sliding_window", "s_aux", "cache", "cu_seq_lens_q", "cu_seqlens")


@dataclasses.dataclass
class Seat:
    """The record of `watch` in an attention module.

    watch: the record of its grid; None: the attention is not served
    index, depth: position among the layers of its tower
    before: the implementation that its configuration named before
    cores: attentions, built when they are needed
    """

    watch: Watch | PackedSizes | None = None
    index: int = 0
    depth: int = 1
    before: str | None = None
    hooks: tuple[Any, ...] = ()
    cores: dict[Any, Attention | None] = dataclasses.field(default_factory=dict)

    def core(self, attention: str, heads: int, head_dim: int, *rest: Any) -> Attention | None:
        """Return the attention that computes this layer of `attention`; None for full attention. See `core`."""
        key = (attention, heads, head_dim, *rest)
        if key not in self.cores:
            spec = expand(attention, self.depth)[self.index]
            self.cores[key] = None if spec.name == "full" else core(spec, heads, head_dim, Grid(1, 1), *rest)
        return self.cores[key]


def register(attention: str) -> str:
    """Register a spec in transformers.

    Args:
        attention: one spec, or one per layer.

    Returns:
        The name for `set_attn_implementation` and `from_pretrained(attn_implementation=…)`.
    """
    from_transformers = _transformers()
    for spec in named(attention):
        check_core(spec)
    name = PREFIX + attention
    attentions, masks = from_transformers.AttentionInterface, from_transformers.AttentionMaskInterface
    fused, masked = (each._global_mapping["sdpa"] for each in (attentions, masks))
    attentions.register(name, functools.partial(attend, attention=attention, fused=fused))
    masks.register(name, functools.partial(mask, fused=masked))
    return name


def mask(fused: Callable[..., Tensor | None], allow_is_bidirectional_skip: bool = False, **given: Any) -> Tensor | None:
    """Build the mask that transformers asks for: that of PyTorch's fused kernel, or None where nothing is hidden.

    For a graph that is exported, transformers would build a mask that hides nothing; with a mask, every layer would
    compute full attention.
    """
    if allow_is_bidirectional_skip and given.get("attention_mask") is None and given.get("local_size") is None:
        return None
    return fused(allow_is_bidirectional_skip=allow_is_bidirectional_skip, **given)


def watch(model: nn.Module, size: Size | None = None) -> towers.Found:
    """Record the grid of every image that `model` processes, so that a registered name may be set.

    Changes no output, weight or configuration; `unwatch` removes the hooks.

    Args:
        model: any module with vision towers of transformers in it.
        size: image size (height, width) for the grids in the result; default: the configuration's.

    Returns:
        The attentions that can be served and, by path, why others cannot.
    """
    found = towers.find(model, size)
    if all(layer.fixed for layer in found.layers):
        raise UserError(f"{type(model).__name__} holds no attention that can be served: {_reasons(found.refused)}")
    before = {layer.name: _named_before(layer.module) for layer in found.layers}
    unwatch(model)
    watches: dict[int, Watch | PackedSizes] = {}
    for layer in found.layers:
        if layer.fixed:
            layer.module.__dict__[_MARK] = Seat(before=before[layer.name])
            continue
        known = watches.get(id(layer.embedding))
        seen = known or watches.setdefault(id(layer.embedding), _watch(layer.family))
        hooks = () if known else (_hook(layer.embedding, seen, layer.family),)
        if isinstance(seen, PackedSizes):
            hooks = (*hooks, layer.module.register_forward_pre_hook(seen.enter, with_kwargs=True))
        layer.module.__dict__[_MARK] = Seat(seen, layer.index, layer.depth, before[layer.name], hooks)
    for name in found.refused:
        left: Any = model.get_submodule(name)
        left.__dict__[_MARK] = Seat(before=_named_before(left))
    return found


def unwatch(model: nn.Module) -> None:
    """Remove what `watch` added to `model`."""
    for module in model.modules():
        seat = module.__dict__.pop(_MARK, None)
        for hook in seat.hooks if seat else ():
            hook.remove()


def close(model: nn.Module) -> int:
    """Restore the implementation that every configuration of a watched model named before, and `unwatch` the model.

    Every configuration that names an attendless attention is restored, wherever transformers' switch has set it.

    Returns:
        The number of attentions that were served.
    """
    modules: list[Any] = list(model.modules())
    seats = [(module, seat) for module in modules if (seat := seat_of(module))]
    before = {id(module.config): seat.before for module, seat in seats if hasattr(module, "config")}
    for module in modules if seats else ():
        if attention_of(module) is not None:
            module.config._attn_implementation_internal = before.get(id(module.config)) or "sdpa"
    unwatch(model)
    return sum(seat.watch is not None for _, seat in seats)


def seat_of(module: nn.Module) -> Seat | None:
    found = module.__dict__.get(_MARK)
    return found if isinstance(found, Seat) else None


def attention_of(module: nn.Module) -> str | None:
    """The spec that a module's configuration names, if it is one of attendless."""
    name = _setting(module)
    return name.removeprefix(PREFIX) if name is not None and name.startswith(PREFIX) else None


def _setting(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _named_before(module: nn.Module) -> str | None:
    seat = seat_of(module)
    if seat is not None and seat.before is not None:
        return seat.before
    return "sdpa" if attention_of(module) is not None else _setting(module)


def _watch(family: Family) -> Watch | PackedSizes:
    return PackedSizes(family.sizes, family.joined, family.halved) if family.sizes else Watch(family.own_grid)


def _hook(embedding: nn.Module, seen: Watch | PackedSizes, family: Family) -> Any:
    if isinstance(seen, PackedSizes):
        return embedding.register_forward_pre_hook(seen.see, with_kwargs=True)
    if family.own_grid:
        return embedding.register_forward_pre_hook(seen.see_input, with_kwargs=True)
    if type(embedding).__name__ == family.embedding:
        return embedding.register_forward_pre_hook(seen.see_shapes, with_kwargs=True)
    return embedding.register_forward_hook(seen.see)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention: str,
    fused: Callable[..., tuple[Tensor, Tensor | None]],
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls: q, k, v [B, H, N, D] → [B, N, H, D], and no attention map."""
    kind, seat, family = type(module).__name__, seat_of(module), hf_family(module)
    watched = None if seat is None else seat.watch
    if seat is None and family is not None and not family.refused:
        raise UserError(
            f"{kind} was set to {PREFIX + attention!r}, but nothing watches which grid its patches form: "
            f"attendless.patch(model, {attention!r}) does both, attendless.huggingface.watch(model) the watching"
        )
    made = None
    if seat is not None and watched is not None and family is not None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
        mask = None if family.own_mask else attention_mask
        if reason := _why_not(query, key, mask, causal, others):
            _warn_once(kind, reason)
        else:
            made = seat.core(attention, query.shape[1], query.shape[3], scaling, dropout, family.turn)
    if made is None or watched is None or family is None:
        others |= {"scaling": scaling, "dropout": dropout, "is_causal": is_causal}
        return fused(module, query, key, value, attention_mask, **others)
    # Move the tokens behind the patches to the front, where an `Attention` expects tokens that are on no grid.
    suffix = family.suffixes(module.config)
    if suffix:
        query, key, value = (t.roll(suffix, 2) for t in (query, key, value))
    segments = towers.segments(watched, family, module.config, query.shape[2])
    rows = (t.split([each.tokens for each in segments], 2) for t in (query, key, value))
    parts = [_attend_segment(made, each, *qkv) for each, *qkv in zip(segments, *rows, strict=True)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return (out.roll(-suffix, 2) if suffix else out).transpose(1, 2).contiguous(), None


def _attend_segment(attention: Attention, segment: Segment, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend among the tokens of one image: q, k, v [B, H, n, D] → [B, H, n, D], all as the tower holds them."""
    attention.check(segment.grid)
    q, k, v = (segment.row_major(t) for t in (q, k, v))
    out, _ = attention.attend(q, k, v, Context(segment.grid))
    return segment.as_held(out)


def core(
    spec: Spec,
    heads: int,
    head_dim: int,
    grid: Grid,
    scaling: float | None = None,
    dropout: float = 0.0,
    turn: float = 0.0,
) -> Attention:
    """Build an attention without projections, for q, k and v that a model projects (and rotates by `turn`) itself."""
    check_core(spec)
    made = create(
        spec, heads * head_dim, heads, grid=grid, head_dim=head_dim, attn_drop=dropout, projections=False, turn=turn
    )
    if scaling is not None:
        made.scale = scaling
    return made.train(dropout > 0)


def check_core(spec: Spec) -> None:
    """Raise unless an attention of `spec` can be put into a model that is not rebuilt."""
    cls = attention_class(spec.name)
    if not cls.has_core():
        raise UserError(f"attention {spec.name!r} does not go without projections of its own")
    if cls.reads:
        raise UserError(f"attention {spec.name!r} reads the output of other layers, which these models do not pass on")
    tried = create(spec, 4, 2, grid=Grid(4, 4), projections=False, device="meta")
    if weights := [name for name, _ in tried.named_parameters()]:
        hint = ": window:bias=false has none" if spec.name == "window" else ""
        raise UserError(
            f"attention {str(spec)!r} has weights of its own ({', '.join(weights)}), for which a model that is not "
            f"rebuilt has no place{hint}"
        )


def _why_not(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, others: dict[str, Any]) -> str | None:
    if mask is not None:
        return "it got a mask"
    if causal:
        return "it is causal"
    if key.shape[1:3] != query.shape[1:3]:
        return "its keys are not its queries' tokens"
    return next((f"it got {name}" for name in _OTHERWISE if others.get(name) is not None), None)


@functools.lru_cache
def _warn_once(kind: str, reason: str) -> None:
    warnings.warn(f"attendless left a {kind} as it was: {reason}", stacklevel=2)


def _reasons(refused: dict[str, str]) -> str:
    return "; ".join(dict.fromkeys(refused.values())) or "none was found"


@functools.cache
def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("Hugging Face's models need transformers: pip install 'attendless[hf]'") from None
    if not hasattr(transformers, "AttentionMaskInterface"):
        raise UserError("this transformers is too old: expected one with AttentionInterface and AttentionMaskInterface")
    return transformers
