"""The native kernels as PyTorch operators, `torch.ops.attendless.*`.

They have shapes and types for tracing (so `torch.compile` and `torch.export` go through them), gradients, a rule for
autocast (they compute in 32-bit floats) and a count of operations for `FlopCounterMode`. They are registered whether or
not the kernels are there; without them, calling one says why.

    foveal_select(q, k, key_bias, places, layout, scale) -> chosen
    foveal_attend(q, k, v, key_bias, places, layout, scale, chosen) -> (out, lse)
    foveal(q, k, v, key_bias, places, layout, scale) -> (out, lse, chosen)             both at once
    foveal_forward(q, k, v, key_bias, places, layout, scale) -> out                    the same; no gradient
    block_attend(q, k, v, key_bias, lists, scale) -> (out, lse)                        fixed lists of keys
    gather_attend(q, k, v, key_bias, indices, counts, scale) -> (out, lse)             each query's own list
    …_backward(out_grad, q, k, v, out, lse, key_bias, …, bias_grad)                    of those that attend
    sparsifiner_select(coefficients, basis, budget, prefix, tau, top) -> (indices, counts)
    sparsifiner(q, k, v, key_bias, coefficients, basis, tail…, budget, prefix, tau, top, scale) -> out          both
    merge(x, keys, importance, sizes, cells, owners, plan, protect) -> (x, sizes, cells, owners)    as merging.merge

Shapes: q, k [B, H, N, D] · v [B, H, N, E] · key_bias [B, N] · places [B, n] · chosen [B, H, T, M] · lse [B, H, N].
`layout` is a `foveal.Layout` as a list of its eight numbers; `block_lists` makes `lists`; `indices` [B, H, N, m] and
`counts` [B, H, N] are as in `gather`.

Sparsifiner's connectivity is `coefficients` [B, H, N, R] × a basis, [R, N] for all images or [B, R, N]; coefficients up
to `tau` count as 0, and with `top` all but so many of the largest. A query keeps the `budget` keys of its largest
connectivities that are above 0, of equal ones the lower index first; the first `prefix` queries see every key. With
`tail_scores` [B, H, N, R], `tail_values` [B, H, R, E] and `share`, [N, R] or [B, N, R], the keys not chosen still count
as R more keys, with the log of what is left of each one's share added to its score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

from ..errors import UserError
from . import foveal, merging, native
from .merging import Merging
from .patterns import Pattern

_library = torch.library.Library("attendless", "FRAGMENT")
_QKV = "Tensor q, Tensor k, Tensor v, Tensor? key_bias"
_FOVEAL = "Tensor? places, int[] layout, float scale"
_BLOCK = "Tensor[] lists, float scale"
_GATHER = "Tensor indices, Tensor? counts, float scale"
#: Stands where a tensor stood that PyTorch keeps for the backward pass.
_SAVED = object()


def _define(name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"attendless::{name}", fake, lib=_library)
    torch.library.register_autocast(f"attendless::{name}", "cpu", torch.float32, lib=_library)


def _refuse_gradient(name: str, instead: str) -> None:
    def backward(ctx: Any, *_: Any) -> Any:
        raise UserError(f"attendless::{name} has no gradient: it is for inference. To train, {instead}")

    torch.library.register_autograd(f"attendless::{name}", backward, lib=_library)


def _define_backward(name: str, more: str, run: Callable[..., Any]) -> None:
    """The operator that gives the gradients of q, k, v and key_bias; the last is empty unless `bias_grad` asks for it,
    because operators return tensors only."""
    given = f"Tensor out_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? key_bias, {more}"

    def fake(_: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Any, ...]:
        key_bias, *_more, bias_grad = rest
        bias = torch.empty_like(key_bias) if bias_grad and key_bias is not None else torch.empty(0, device=q.device)
        return (*(_heads(x, x.shape[-1]) for x in (q, k, v)), bias)

    _define(name, f"({given}, bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor)", run, fake)


def _differentiate(name: str, backward_name: str) -> None:
    """The gradient of an operator (q, k, v, key_bias, *more) -> (out, lse, *made), by a backward operator that is given
    key_bias, more and made."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, *more = inputs
        out, lse, *made = output
        ctx.mark_non_differentiable(lse, *made)
        # Tensors, alone or in a list, must be saved by PyTorch; numbers need not.
        leaves, ctx.structure = pytree.tree_flatten([*more, *made])
        ctx.plain = [_SAVED if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.save_for_backward(q, k, v, out, lse, *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        # The gradient of a list of tensors is a list.
        ctx.nothing = [[None] * len(x) if isinstance(x, list) and isinstance(x[0], Tensor) else None for x in more[1:]]

    def backward(ctx: Any, out_grad: Tensor, *_: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        tensors = iter(saved)
        more = pytree.tree_unflatten([next(tensors) if x is _SAVED else x for x in ctx.plain], ctx.structure)
        wants_bias = ctx.needs_input_grad[3]
        *grads, bias = getattr(torch.ops.attendless, backward_name)(out_grad, q, k, v, out, lse, *more, wants_bias)
        return (*grads, bias if wants_bias else None, *ctx.nothing)

    torch.library.register_autograd(f"attendless::{name}", backward, setup_context=setup, lib=_library)


def _heads(like: Tensor, width: int) -> Tensor:
    B, H, N, _ = like.shape
    return like.new_empty(B, N, H, width).transpose(1, 2)


def _results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _heads(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


# Foveal --------------------------------------------------------------------------------------------------------------


def _chosen(q: Tensor, layout: Sequence[int]) -> Tensor:
    shape = foveal.Layout(*layout)
    return q.new_empty(*q.shape[:2], shape.tiles, shape.budget, dtype=torch.int32)


_define(
    "foveal_select",
    f"(Tensor q, Tensor k, Tensor? key_bias, {_FOVEAL}) -> Tensor",
    native.foveal_select,
    lambda q, k, key_bias, places, layout, scale: _chosen(q, layout),
)
_define("foveal_attend", f"({_QKV}, {_FOVEAL}, Tensor chosen) -> (Tensor, Tensor)", native.foveal_attend, _results)
_define(
    "foveal",
    f"({_QKV}, {_FOVEAL}) -> (Tensor, Tensor, Tensor)",
    native.foveal,
    lambda q, k, v, key_bias, places, layout, scale: (*_results(q, k, v), _chosen(q, layout)),
)
_define(
    "foveal_forward", f"({_QKV}, {_FOVEAL}) -> Tensor", native.foveal_forward, lambda q, k, v, *_: _results(q, k, v)[0]
)
_refuse_gradient("foveal_forward", "call foveal")
_define_backward("foveal_backward", f"{_FOVEAL}, Tensor chosen", native.foveal_backward)
_differentiate("foveal", "foveal_backward")
_differentiate("foveal_attend", "foveal_backward")


# Fixed blocks --------------------------------------------------------------------------------------------------------


def block_lists(pattern: Pattern) -> list[Tensor]:
    """A block pattern as the lists `block_attend` reads: int32 query_start, queries, key_start, keys.

    Each block of queries is a tile; its keys are listed token by token, for all heads or head by head.
    """
    return [torch.from_numpy(array) for array in block_arrays(pattern)]


def block_arrays(pattern: Pattern) -> list[np.ndarray]:
    """The same as arrays, which no tracer sees."""
    blocks = pattern.blocks
    key_start = np.concatenate([[0], np.cumsum(pattern.sees @ blocks.sizes)])
    tokens = [blocks.order[np.repeat(row, blocks.sizes)] for row in pattern.sees.reshape(-1, len(blocks))]
    arrays = (blocks.starts, blocks.order, key_start, np.concatenate(tokens))
    return [array.astype(np.int32) for array in arrays]


_define("block_attend", f"({_QKV}, {_BLOCK}) -> (Tensor, Tensor)", native.block_attend, _results)
_define_backward("block_backward", _BLOCK, native.block_backward)
_differentiate("block_attend", "block_backward")


# Lists of each query's own -------------------------------------------------------------------------------------------

_define("gather_attend", f"({_QKV}, {_GATHER}) -> (Tensor, Tensor)", native.gather_attend, _results)
_define_backward("gather_backward", _GATHER, native.gather_backward)
_differentiate("gather_attend", "gather_backward")


# Lists each query finds by itself ------------------------------------------------------------------------------------

_LIMITS = "int budget, int prefix, float tau, int top"
_define(
    "sparsifiner_select",
    f"(Tensor coefficients, Tensor basis, {_LIMITS}) -> (Tensor, Tensor)",
    native.sparsifiner_select,
    lambda coefficients, basis, budget, prefix, tau, top: (
        coefficients.new_empty(*coefficients.shape[:3], budget, dtype=torch.int32),
        coefficients.new_empty(coefficients.shape[:3], dtype=torch.int32),
    ),
)
_define(
    "sparsifiner",
    f"({_QKV}, Tensor coefficients, Tensor basis, Tensor? tail_scores, Tensor? tail_values, Tensor? share, {_LIMITS}, "
    "float scale) -> Tensor",
    native.sparsifiner,
    lambda q, k, v, *_: _results(q, k, v)[0],
)
_refuse_gradient("sparsifiner", "choose keys with sparsifiner_select and attend with gather_attend")


# Tokens that are alike -----------------------------------------------------------------------------------------------


def _merged(x: Tensor, keys: Tensor, importance: Any, sizes: Any, cells: Any, owners: Any, plan: Sequence[int], _: Any):
    shape = Merging(*plan)
    B, N, C = x.shape
    places, moved = (x.new_empty(B, count, dtype=torch.int64) for count in (shape.left, shape.cells))
    return x.new_empty(B, N - shape.r, C), x.new_empty(B, shape.left), places, moved


_define(
    "merge",
    "(Tensor x, Tensor keys, Tensor? importance, Tensor? sizes, Tensor? cells, Tensor? owners, int[] plan, "
    "float protect) -> (Tensor, Tensor, Tensor, Tensor)",
    native.merge,
    _merged,
)
_refuse_gradient("merge", "call sparse.merging.merge")


# Operations, counted as PyTorch counts them: two for a multiply-add --------------------------------------------------


def _pairs(shape: Sequence[int], layout: Sequence[int]) -> int:
    """Pairs of a query and a key it meets, in one head."""
    plan = foveal.Layout(*layout)
    patches = shape[2] - plan.prefix
    return patches * foveal.keys_seen(plan, patches) + plan.prefix * shape[2]


def _first_order(shape: Sequence[int], layout: Sequence[int]) -> int:
    """Products of a row of keys with a row of values that order 1 takes, in one head."""
    plan = foveal.Layout(*layout)
    return foveal.slope_macs(plan, shape[2] - plan.prefix)


def _select_flops(q: Sequence[int], layout: Sequence[int]) -> int:
    plan = foveal.Layout(*layout)
    return 2 * math.prod(q[:2]) * plan.tiles * plan.cells * q[3]


@register_flop_formula(torch.ops.attendless.foveal_select)
def _(q, k, key_bias, places, layout, scale, *args, **kwargs) -> int:
    return _select_flops(q, layout)


@register_flop_formula(torch.ops.attendless.foveal_attend)
def _attend_flops(q, k, v, key_bias, places, layout, scale, *args, **kwargs) -> int:
    return 2 * math.prod(q[:2]) * (_pairs(q, layout) * (q[3] + v[3]) + _first_order(q, layout) * q[3] * v[3])


@register_flop_formula([torch.ops.attendless.foveal, torch.ops.attendless.foveal_forward])
def _(q, k, v, key_bias, places, layout, scale, *args, **kwargs) -> int:
    return _select_flops(q, layout) + _attend_flops(q, k, v, key_bias, places, layout, scale)


@register_flop_formula(torch.ops.attendless.foveal_backward)
def _(out_grad, q, k, v, out, lse, key_bias, places, layout, *args, **kwargs) -> int:
    pairs = _pairs(q, layout) * (3 * q[3] + 2 * v[3])
    return 2 * math.prod(q[:2]) * (pairs + 5 * _first_order(q, layout) // 2 * q[3] * v[3])


def _block_pairs(q: Sequence[int], lists: Sequence[Tensor]) -> int:
    """Pairs of a query and a key over all images and heads."""
    queries, keys = lists[0].diff(), lists[2].diff()
    heads = 1 if len(keys) == len(queries) else q[1]
    return math.prod(q[:2]) // heads * int((queries.repeat(heads).long() * keys.long()).sum())


@register_flop_formula(torch.ops.attendless.block_attend, get_raw=True)
def _(q, k, v, key_bias, lists, scale, *args, **kwargs) -> int:
    return 2 * _block_pairs(q.shape, lists) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.attendless.block_backward, get_raw=True)
def _(out_grad, q, k, v, out, lse, key_bias, lists, scale, bias_grad, *args, **kwargs) -> int:
    return 2 * _block_pairs(q.shape, lists) * (3 * q.shape[3] + 2 * v.shape[3])


def _gather_pairs(indices: Tensor, counts: Tensor | None) -> int:
    return indices.numel() if counts is None else int(counts.sum())


@register_flop_formula(torch.ops.attendless.gather_attend, get_raw=True)
def _(q, k, v, key_bias, indices, counts, scale, *args, **kwargs) -> int:
    return 2 * _gather_pairs(indices, counts) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.attendless.gather_backward, get_raw=True)
def _(out_grad, q, k, v, out, lse, key_bias, indices, counts, scale, bias_grad, *args, **kwargs) -> int:
    return 2 * _gather_pairs(indices, counts) * (3 * q.shape[3] + 2 * v.shape[3])


# Every coefficient counts, though small ones are skipped, and every list is full: how many are is in the numbers.


@register_flop_formula(torch.ops.attendless.sparsifiner_select)
def _choose_flops(coefficients, basis, budget, prefix, *args, **kwargs) -> int:
    B, H, N, R = coefficients
    return 2 * B * H * max(0, N - prefix) * R * N


@register_flop_formula(torch.ops.attendless.sparsifiner)
def _(
    q, k, v, key_bias, coefficients, basis, tail_scores, tail_values, share, budget, prefix, *args, **kwargs
) -> int:  # fmt: skip
    B, H, N, R = coefficients
    choosing = _choose_flops(coefficients, basis, budget, prefix)
    patches = max(0, N - prefix)
    chosen = (patches * budget + (N - patches) * N) * (q[3] + v[3])
    tail = patches * R * v[3] if share else 0
    return choosing + 2 * B * H * (chosen + tail)


@register_flop_formula(torch.ops.attendless.merge)
def _(x, keys, importance, sizes, cells, owners, plan, protect, *args, **kwargs) -> int:
    return 2 * x[0] * merging.macs(Merging(*plan), keys[-1])
