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
    sparsifiner_select(coefficients, basis, budget, prefix, tau, top) -> (indices, counts)
    sparsifiner(q, k, v, key_bias, coefficients, basis, tail…, budget, prefix, tau, top, scale) -> out          both

Shapes: q, k [B, H, N, D] · v [B, H, N, E] · key_bias [B, N] · places [B, n] · chosen [B, H, T, M] · lse [B, H, N].
`layout` is a `foveal.Layout` as a list of its seven numbers; `block_lists` makes `lists`; `indices` [B, H, N, m] and
`counts` [B, H, N] are as in `gather`.

Sparsifiner's connectivity is `coefficients` [B, H, N, R] × a basis [R, N] in compressed rows (`basis_start` [R + 1],
`basis_index`, `basis_value`); coefficients up to `tau` count as 0. A query keeps the `budget` keys of its largest that
are above 0, of equal ones the lower index first; the first `prefix` queries see every key. With `tail_scores`
[B, H, N, R], `tail_values` [B, H, R, E] and `share` [N, R] the keys not chosen still count as R more keys, with the log
of what is left of each one's share added to its score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..errors import UserError
from . import foveal, native
from .patterns import Pattern

_library = torch.library.Library("attendless", "FRAGMENT")
_FOVEAL = "Tensor? key_bias, Tensor? places, int[] layout, float scale"
_BLOCK = "Tensor? key_bias, Tensor[] lists, float scale"
_GATHER = "Tensor? key_bias, Tensor indices, Tensor? counts, float scale"


def _define(name: str, signature: str, run: Any, fake: Any) -> None:
    _library.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"attendless::{name}", fake, lib=_library)
    torch.library.register_autocast(f"attendless::{name}", "cpu", torch.float32, lib=_library)


def _heads(like: Tensor, width: int) -> Tensor:
    B, H, N, _ = like.shape
    return like.new_empty(B, N, H, width).transpose(1, 2)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _heads(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _refuse_gradient(name: str, instead: str) -> None:
    def backward(ctx: Any, *_: Any) -> Any:
        raise UserError(f"attendless::{name} has no gradient: it is for inference. To train, {instead}")

    torch.library.register_autograd(f"attendless::{name}", backward, lib=_library)


# Foveal --------------------------------------------------------------------------------------------------------------


def _chosen_shape(q: Tensor, layout: Sequence[int]) -> Tensor:
    shape = foveal.Layout(*layout)
    return q.new_empty(*q.shape[:2], shape.tiles, shape.budget, dtype=torch.int32)


def _setup_foveal(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Of `foveal`, which returns the cells chosen, and of `foveal_attend`, which is given them last."""
    q, k, v, key_bias, places, ctx.layout, ctx.scale, *given = inputs
    out, lse, *made = output
    (chosen,) = given or made
    ctx.given = len(given)
    ctx.mark_non_differentiable(lse, *made)
    ctx.save_for_backward(q, k, v, out, lse, chosen, key_bias, places)


def _backward_foveal(ctx: Any, out_grad: Tensor, *_: Any) -> tuple[Any, ...]:
    wants_bias = ctx.needs_input_grad[3]
    *grads, bias = torch.ops.attendless.foveal_backward(out_grad, *ctx.saved_tensors, ctx.layout, ctx.scale, wants_bias)
    return (*grads, bias if wants_bias else None, None, None, None, *[None] * ctx.given)


def _fake_backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    key_bias: Tensor | None,
    places: Tensor | None,
    layout: Sequence[int],
    scale: float,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    # Operators return tensors only: an empty one stands for the gradient nobody asked for.
    bias = torch.empty_like(key_bias) if bias_grad and key_bias is not None else torch.empty(0, device=q.device)
    return (*(_heads(x, x.shape[-1]) for x in (q, k, v)), bias)


_define(
    "foveal_select",
    f"(Tensor q, Tensor k, {_FOVEAL}) -> Tensor",
    native.foveal_select,
    lambda q, k, key_bias, places, layout, scale: _chosen_shape(q, layout),
)
_define(
    "foveal_attend",
    f"(Tensor q, Tensor k, Tensor v, {_FOVEAL}, Tensor chosen) -> (Tensor, Tensor)",
    lambda *arguments: native.foveal_attend(*arguments)[:2],
    lambda q, k, v, key_bias, places, layout, scale, chosen: _results(q, v),
)
_define(
    "foveal",
    f"(Tensor q, Tensor k, Tensor v, {_FOVEAL}) -> (Tensor, Tensor, Tensor)",
    native.foveal_attend,
    lambda q, k, v, key_bias, places, layout, scale: (*_results(q, v), _chosen_shape(q, layout)),
)
_define(
    "foveal_forward",
    f"(Tensor q, Tensor k, Tensor v, {_FOVEAL}) -> Tensor",
    native.foveal_forward,
    lambda q, k, v, *_: _heads(q, v.shape[-1]),
)
_refuse_gradient("foveal_forward", "call foveal")
_define(
    "foveal_backward",
    f"(Tensor out_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor chosen, {_FOVEAL}, bool bias_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    native.foveal_backward,
    _fake_backward,
)
for _name in ("foveal", "foveal_attend"):
    torch.library.register_autograd(f"attendless::{_name}", _backward_foveal, setup_context=_setup_foveal, lib=_library)


# Fixed blocks --------------------------------------------------------------------------------------------------------


def block_lists(pattern: Pattern) -> list[Tensor]:
    """A block pattern as the lists `block_attend` reads: int32 query_start, queries, key_start, keys.

    Each block of queries is a tile; its keys are listed token by token, for all heads or head by head.
    """
    blocks = pattern.blocks
    key_start = np.concatenate([[0], np.cumsum(pattern.sees @ blocks.sizes)])
    tokens = [blocks.order[np.repeat(row, blocks.sizes)] for row in pattern.sees.reshape(-1, len(blocks))]
    arrays = (blocks.starts, blocks.order, key_start, np.concatenate(tokens))
    return [torch.from_numpy(array.astype(np.int32)) for array in arrays]


def _setup_block(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_bias, lists, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.scale = scale
    ctx.save_for_backward(q, k, v, out, lse, key_bias, *lists)


def _backward_block(ctx: Any, out_grad: Tensor, *_: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, key_bias, *lists = ctx.saved_tensors
    wants_bias = ctx.needs_input_grad[3]
    *grads, bias = torch.ops.attendless.block_backward(
        out_grad, q, k, v, out, lse, key_bias, lists, ctx.scale, wants_bias
    )
    return (*grads, bias if wants_bias else None, [None] * len(lists), None)


def _fake_block_backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_bias: Tensor | None,
    lists: Sequence[Tensor],
    scale: float,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    return _fake_backward(out_grad, q, k, v, out, lse, lse, key_bias, None, [], scale, bias_grad)


_define(
    "block_attend",
    f"(Tensor q, Tensor k, Tensor v, {_BLOCK}) -> (Tensor, Tensor)",
    native.block_attend,
    lambda q, k, v, key_bias, lists, scale: _results(q, v),
)
_define(
    "block_backward",
    f"(Tensor out_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_BLOCK}, bool bias_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    native.block_backward,
    _fake_block_backward,
)
torch.library.register_autograd("attendless::block_attend", _backward_block, setup_context=_setup_block, lib=_library)


# Lists of each query's own -------------------------------------------------------------------------------------------


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_bias, indices, counts, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, key_bias, indices, counts)


def _backward_gather(ctx: Any, out_grad: Tensor, *_: Any) -> tuple[Any, ...]:
    wants_bias = ctx.needs_input_grad[3]
    *grads, bias = torch.ops.attendless.gather_backward(out_grad, *ctx.saved_tensors, ctx.scale, wants_bias)
    return (*grads, bias if wants_bias else None, None, None, None)


def _fake_gather_backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_bias: Tensor | None,
    indices: Tensor,
    counts: Tensor | None,
    scale: float,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    return _fake_backward(out_grad, q, k, v, out, lse, lse, key_bias, None, [], scale, bias_grad)


_define(
    "gather_attend",
    f"(Tensor q, Tensor k, Tensor v, {_GATHER}) -> (Tensor, Tensor)",
    native.gather_attend,
    lambda q, k, v, key_bias, indices, counts, scale: _results(q, v),
)
_define(
    "gather_backward",
    f"(Tensor out_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_GATHER}, bool bias_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    native.gather_backward,
    _fake_gather_backward,
)
torch.library.register_autograd(
    "attendless::gather_attend", _backward_gather, setup_context=_setup_gather, lib=_library
)


# Lists each query finds by itself ------------------------------------------------------------------------------------


_define(
    "sparsifiner_select",
    "(Tensor coefficients, Tensor basis, int budget, int prefix, float tau, int top) -> (Tensor, Tensor)",
    native.sparsifiner_select,
    lambda coefficients, basis, budget, prefix, tau, top: (
        coefficients.new_empty(*coefficients.shape[:3], budget, dtype=torch.int32),
        coefficients.new_empty(coefficients.shape[:3], dtype=torch.int32),
    ),
)
_define(
    "sparsifiner",
    "(Tensor q, Tensor k, Tensor v, Tensor? key_bias, Tensor coefficients, Tensor basis, Tensor? tail_scores, "
    "Tensor? tail_values, Tensor? share, int budget, int prefix, float tau, int top, float scale) -> Tensor",
    native.sparsifiner,
    lambda q, k, v, *_: _heads(q, v.shape[-1]),
)
_refuse_gradient("sparsifiner", "choose keys with sparsifiner_select and attend with gather_attend")


# Operations, counted as PyTorch counts them: two for a multiply-add --------------------------------------------------


def _pairs(shape: Sequence[int], layout: Sequence[int]) -> int:
    """Pairs of a query and a key it meets, in one head."""
    plan = foveal.Layout(*layout)
    patches = shape[2] - plan.prefix
    return patches * foveal.keys_seen(plan, patches) + plan.prefix * shape[2]


def _select_flops(q: Sequence[int], layout: Sequence[int]) -> int:
    plan = foveal.Layout(*layout)
    return 2 * math.prod(q[:2]) * plan.tiles * plan.cells * q[3]


@register_flop_formula(torch.ops.attendless.foveal_select)
def _(q, k, key_bias, places, layout, scale, *args, **kwargs) -> int:
    return _select_flops(q, layout)


@register_flop_formula(torch.ops.attendless.foveal_attend)
def _attend_flops(q, k, v, key_bias, places, layout, scale, *args, **kwargs) -> int:
    return 2 * math.prod(q[:2]) * _pairs(q, layout) * (q[3] + v[3])


@register_flop_formula([torch.ops.attendless.foveal, torch.ops.attendless.foveal_forward])
def _(q, k, v, key_bias, places, layout, scale, *args, **kwargs) -> int:
    return _select_flops(q, layout) + _attend_flops(q, k, v, key_bias, places, layout, scale)


@register_flop_formula(torch.ops.attendless.foveal_backward)
def _(out_grad, q, k, v, out, lse, chosen, key_bias, places, layout, scale, bias_grad, *args, **kwargs) -> int:
    return 2 * math.prod(q[:2]) * _pairs(q, layout) * (3 * q[3] + 2 * v[3])


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
