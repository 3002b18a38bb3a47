"""The door to Hugging Face: attentions of ours behind transformers' own switch, in the model as it stands.

    attendless.patch(model, "foveal:keep=0.1")                        # from here on, with a report
    model.set_attn_implementation("sdpa")                             # back, and forth again, as transformers does it
    model.set_attn_implementation("attendless:foveal:keep=0.1")
    model.set_attn_implementation(attendless.huggingface.register("foveal:keep=0.25"))

transformers' models hand q, k and v to a function registered in their `AttentionInterface` under a name; ours are
called `attendless:` and a spec. A name must be registered before it is set, and a model must be watched (`watch`, which
`patch` does) before it runs: nothing in what the function is given says which grid the tokens stand on.

What is not a vision tower's self-attention (text, masks, causal and cross attention) runs in PyTorch's fused kernel,
as it does by default.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

from torch import Tensor, nn

from ...attention import (
    Attention,
    Context,
    Grid,
    Spec,
    attention_class,
    create,
    expand,
    named,
)
from ...errors import UserError
from ..grid_tracking import Watch
from . import families as towers
from .families import Family, Found

PREFIX = "attendless:"
#: Where a watched model's attention keeps its seat.
_MARK = "_attendless_seat"
#: What an attention can be given that makes it another function than softmax(q kᵀ) v, unless it is None.
_OTHERWISE = ("position_bias", "softcap", "sliding_window", "s_aux", "cache", "cu_seq_lens_q", "cu_seqlens")


@dataclasses.dataclass
class Seat:
    """What an attention of a watched model knows: its place among its tower's layers, and who watches its grid.

    Without a watch it is left alone. `before` is what its configuration said before, `cores` are made when needed.
    """

    watch: Watch | None = None
    index: int = 0
    of: int = 1
    before: str | None = None
    hooks: tuple[Any, ...] = ()
    cores: dict[Any, Attention | None] = dataclasses.field(default_factory=dict)

    def core(self, attention: str, heads: int, head_dim: int, *rest: Any) -> Any:
        """The mechanism that computes this layer of `attention`, or None where that is full attention; see `core`."""
        key = (attention, heads, head_dim, *rest)
        if key not in self.cores:
            spec = expand(attention, self.of)[self.index]
            self.cores[key] = None if spec.name == "full" else core(spec, heads, head_dim, Grid(1, 1), *rest)
        return self.cores[key]


def register(attention: str) -> str:
    """Make a spec known to transformers; its name there, for `set_attn_implementation` and `from_pretrained`."""
    from_transformers = _transformers()
    for spec in named(attention):
        check_core(spec)
    name = PREFIX + attention
    attentions, masks = from_transformers.AttentionInterface, from_transformers.AttentionMaskInterface
    fused, masked = (each._global_mapping["sdpa"] for each in (attentions, masks))
    attentions.register(name, functools.partial(attend, attention=attention, fused=fused))
    masks.register(name, functools.partial(mask, fused=masked))
    return name


def mask(fused: Any, allow_is_bidirectional_skip: bool = False, **given: Any) -> Tensor | None:
    """What transformers calls for a mask: one as for PyTorch's fused kernel, which is who gets it.

    Where nothing is hidden there is none: transformers would make one all the same for a graph that is exported, in
    which every layer would then attend fully.
    """
    if allow_is_bidirectional_skip and given.get("attention_mask") is None and given.get("local_size") is None:
        return None
    return fused(allow_is_bidirectional_skip=allow_is_bidirectional_skip, **given)


def watch(model: nn.Module, size: tuple[int, int] | None = None) -> Found:
    """Let `model` know the grid its tokens stand on, so that a registered name may be set; what was found in it.

    Computes nothing, and changes no weight and no configuration; `unwatch` takes it back. `size` is that of the images
    for which the grids in the answer are.
    """
    found = towers.find(model, size)
    if all(place.stays for place in found.places):
        raise UserError(f"{type(model).__name__} holds no attention that can be served: {_reasons(found.left)}")
    before = {id(place): _named_before(place.module) for place in found.places}
    unwatch(model)
    watches: dict[int, Watch] = {}
    for place in found.places:
        if place.stays:
            place.module.__dict__[_MARK] = Seat(before=before[id(place)])
            continue
        known = watches.get(id(place.embedding))
        seen = known or watches.setdefault(id(place.embedding), Watch(place.family.own))
        hooks = () if known else (_hook(place.embedding, seen, place.family),)
        place.module.__dict__[_MARK] = Seat(seen, place.index, place.of, before[id(place)], hooks)
    for name in found.left:
        left: Any = model.get_submodule(name)
        left.__dict__[_MARK] = Seat(before=_named_before(left))
    return found


def unwatch(model: nn.Module) -> None:
    """Take back what `watch` did."""
    for module in model.modules():
        seat = module.__dict__.pop(_MARK, None)
        for hook in seat.hooks if seat else ():
            hook.remove()


def close(model: nn.Module) -> int:
    """Let every attention of a watched model compute what it did before, and watch no more; how many were served.

    Whatever configuration in it names one of ours gets back what it said, wherever transformers' switch has put it.
    """
    modules: list[Any] = list(model.modules())
    seats = [(module, seat) for module in modules if (seat := seat_of(module))]
    before = {id(module.config): seat.before for module, seat in seats if hasattr(module, "config")}
    for module in modules if seats else ():
        if attention_of(module) is not None:
            module.config._attn_implementation_internal = before.get(id(module.config)) or "sdpa"
    unwatch(model)
    return sum(seat.watch is not None for _, seat in seats)


def seat_of(module: Any) -> Seat | None:
    return module.__dict__.get(_MARK)


def attention_of(module: Any) -> str | None:
    """The spec that a module's configuration names, if it is one of ours."""
    name = _setting(module)
    return name.removeprefix(PREFIX) if name is not None and name.startswith(PREFIX) else None


def _setting(module: Any) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _named_before(module: Any) -> str | None:
    seat = seat_of(module)
    if seat is not None and seat.before is not None:
        return seat.before
    return "sdpa" if attention_of(module) is not None else _setting(module)


def _hook(embedding: nn.Module, seen: Watch, family: Family) -> Any:
    if family.own:
        return embedding.register_forward_pre_hook(seen.see_input, with_kwargs=True)
    if type(embedding).__name__ in towers.SHAPED:
        return embedding.register_forward_pre_hook(seen.see_shapes, with_kwargs=True)
    return embedding.register_forward_hook(seen.see)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention: str,
    fused: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: q, k, v [B, H, N, D] → [B, N, H, D], and no map."""
    kind, seat = type(module).__name__, seat_of(module)
    family, watched = towers.FAMILIES.get(kind), None if seat is None else seat.watch
    if seat is None and family is not None:
        raise UserError(
            f"{kind} was set to {PREFIX + attention!r}, but nothing watches which grid its patches form: "
            f"attendless.patch(model, {attention!r}) does both, attendless.huggingface.watch(model) the watching"
        )
    made = None
    if seat is not None and watched is not None and family is not None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
        if reason := _why_not(query, key, attention_mask, causal, others):
            _say_once(kind, reason)
        else:
            made = seat.core(attention, query.shape[1], query.shape[3], scaling, dropout, family.turn)
    if made is None or watched is None or family is None:
        others |= {"scaling": scaling, "dropout": dropout, "is_causal": is_causal}
        return fused(module, query, key, value, attention_mask, **others)
    grid = towers.grid_of(watched, family, module.config, query.shape[2])
    made.check(grid)
    # Tokens behind the patches go in front, where ours expect those that stand on no grid.
    behind = family.behind(module.config)
    if behind:
        query, key, value = (t.roll(behind, 2) for t in (query, key, value))
    out, _ = made.attend(query, key, value, Context(grid))
    return (out.roll(-behind, 2) if behind else out).transpose(1, 2).contiguous(), None


def core(
    spec: Spec,
    heads: int,
    head_dim: int,
    grid: Grid,
    scaling: float | None = None,
    dropout: float = 0.0,
    turn: float = 0.0,
) -> Attention:
    """The mechanism alone, for q, k and v that a model has projected (and rotated by `turn` a patch) itself."""
    check_core(spec)
    made: Any = create(
        spec, heads * head_dim, heads, grid=grid, head_dim=head_dim, attn_drop=dropout, projections=False, turn=turn
    )
    if scaling is not None:
        made.scale = scaling
    return made.train(dropout > 0)


def check_core(spec: Spec) -> None:
    """Raise unless an attention of `spec` can stand in a model that is not rebuilt."""
    cls = attention_class(spec.name)
    if not cls.has_core():
        raise UserError(f"attention {spec.name!r} does not go without projections of its own")
    if cls.reads:
        raise UserError(f"attention {spec.name!r} reads what other layers leave, which these models do not pass on")
    tried = create(spec, 4, 2, grid=Grid(4, 4), projections=False, device="meta")
    if weights := [name for name, _ in tried.named_parameters()]:
        hint = ": window:bias=false has none" if spec.name == "window" else ""
        raise UserError(
            f"attention {str(spec)!r} has weights of its own ({', '.join(weights)}), for which there is no "
            f"place in a model that stays as it is{hint}"
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
def _say_once(kind: str, reason: str) -> None:
    warnings.warn(f"attendless left a {kind} as it was: {reason}", stacklevel=2)


def _reasons(left: dict[str, str]) -> str:
    return "; ".join(dict.fromkeys(left.values())) or "none was found"


@functools.cache
def _transformers() -> Any:
    try:
        import transformers

        return transformers if hasattr(transformers, "AttentionMaskInterface") else _too_old()
    except ImportError:
        raise UserError("Hugging Face's models need transformers: pip install 'attendless[hf]'") from None


def _too_old() -> Any:
    raise UserError("this transformers is too old: expected one with AttentionInterface and AttentionMaskInterface")
