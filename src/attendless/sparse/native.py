"""The compiled kernels, as functions of tensors.

Everything is computed in 32-bit floats, whatever comes in; results come back in the type of `q`. Results lie in memory
as [B, N, H, ·], so that joining the heads again costs nothing.

Forward passes read q, k and v in bfloat16 where they lie, and write their result in it: widened on the way in, rounded
once on the way out. Copied into 32-bit floats first are other types (float16 too), whatever a backward pass or `merge`
is given, and Sparsifiner's coefficients, tables and tails.

Shapes: B batch · H heads · N tokens · n patches · T tiles of queries · M cells chosen. `layout` is a
`foveal.Layout` as a list of its eight numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..compiled import (
    available,
    forced,
    instruction_set,
    instruction_sets,
    kernels,
    reason,
)
from ..errors import UserError
from . import arrays
from .merging import Merging

__all__ = ["available", "forced", "instruction_set", "instruction_sets", "reason"]


def threading() -> str:
    """Why threads are started anew for each call, some 20 µs each; empty if they are those of PyTorch's OpenMP."""
    return str(kernels().why_own_threads()) if available else ""


def _chosen(q: Tensor, layout: Sequence[int]) -> Tensor:
    tiles = arrays.call(kernels().foveal_tiles, layout)
    return torch.empty(*q.shape[:2], tiles, layout[6], dtype=torch.int32)


def _foveal_inputs(
    given: Iterable[Any], key_bias: Tensor | None, places: Tensor | None, layout: Sequence[int], scale: float
) -> list[Any]:
    extras = [arrays.floats(key_bias), arrays.ints(places)]
    return [*given, *extras, layout, scale, torch.get_num_threads()]


def foveal_select(
    q: Tensor, k: Tensor, key_bias: Tensor | None, places: Tensor | None, layout: Sequence[int], scale: float
) -> Tensor:
    """The cells each tile looks at closely: int32 [B, H, T, M], ascending."""
    inputs = _foveal_inputs(map(arrays.heads, (q, k)), key_bias, places, layout, scale)
    chosen = _chosen(q, layout)
    arrays.call(kernels().foveal_select, *inputs, chosen.numpy())
    return chosen


def foveal_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    places: Tensor | None,
    layout: Sequence[int],
    scale: float,
    chosen: Tensor,
) -> tuple[Tensor, Tensor]:
    """out [B, H, N, ·] and log Σ exp of each query's scores [B, H, N], given the cells chosen."""
    return _foveal(q, k, v, key_bias, places, layout, scale, arrays.ints(chosen), select=False)


def foveal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    places: Tensor | None,
    layout: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose and attend: out, log Σ exp, and the cells chosen."""
    arrays.heads(q)  # in doubt it says what is wrong with its shape
    chosen = _chosen(q, layout)
    return *_foveal(q, k, v, key_bias, places, layout, scale, chosen.numpy(), select=True), chosen


def foveal_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    places: Tensor | None,
    layout: Sequence[int],
    scale: float,
) -> Tensor:
    """Choose and attend: out [B, H, N, ·] alone; what a gradient would need is not kept."""
    return _foveal(q, k, v, key_bias, places, layout, scale, None, select=True)[0]


def _foveal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    places: Tensor | None,
    layout: Sequence[int],
    scale: float,
    chosen: Any,
    *,
    select: bool,
) -> tuple[Tensor, Tensor]:
    inputs = _foveal_inputs(map(arrays.heads, (q, k, v)), key_bias, places, layout, scale)
    out, lse = arrays.results(q, v)
    arrays.call(kernels().foveal_attend, *inputs, chosen, select, arrays.array(out), lse.numpy())
    return arrays.typed(out, q), lse


def _gradients(q: Tensor, k: Tensor, v: Tensor, bias_grad: bool) -> list[Tensor]:
    """Room for the gradients of q, k, v and, head by head, of key_bias: none, unless asked for."""
    return [*(arrays.room(x, x.shape[-1]) for x in (q, k, v)), torch.empty(q.shape[:3] if bias_grad else 0)]


def _arrays(gradients: list[Tensor]) -> list[Any]:
    return [x.numpy() if x.numel() or x.ndim > 1 else None for x in gradients]


def _finish(gradients: list[Tensor], q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None) -> tuple[Tensor, ...]:
    *heads, bias = gradients
    if key_bias is not None and bias.ndim > 1:
        bias = bias.sum(1).to(key_bias.dtype)  # a key's bias is the same for every head
    return (*(x.to(like.dtype) for x, like in zip(heads, (q, k, v), strict=True)), bias)


def foveal_backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_bias: Tensor | None,
    places: Tensor | None,
    layout: Sequence[int],
    scale: float,
    chosen: Tensor,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and key_bias; the last is empty unless `bias_grad` asks for it."""
    inputs = _foveal_inputs(map(arrays.rows, (q, k, v)), key_bias, places, layout, scale)
    gradients = _gradients(q, k, v, bias_grad)
    forward = [arrays.ints(chosen), arrays.rows(out), arrays.floats(lse)]
    arrays.call(kernels().foveal_backward, *inputs, *forward, arrays.rows(out_grad), *_arrays(gradients))
    return _finish(gradients, q, k, v, key_bias)


def _block_inputs(given: Iterable[Any], key_bias: Tensor | None, lists: Sequence[Tensor], scale: float) -> list[Any]:
    extras = [arrays.floats(key_bias), *(arrays.ints(x) for x in lists)]
    return [*given, *extras, scale, torch.get_num_threads()]


def block_attend(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, lists: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """out and log Σ exp for fixed lists of keys: `lists` are query_start, queries, key_start and keys of the tiles."""
    inputs = _block_inputs(map(arrays.heads, (q, k, v)), key_bias, lists, scale)
    out, lse = arrays.results(q, v)
    arrays.call(kernels().block_attend, *inputs, arrays.array(out), lse.numpy())
    return arrays.typed(out, q), lse


def block_backward(
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
    """Gradients of q, k, v and key_bias; the last is empty unless `bias_grad` asks for it."""
    inputs = _block_inputs(map(arrays.rows, (q, k, v)), key_bias, lists, scale)
    gradients = _gradients(q, k, v, bias_grad)
    arrays.call(
        kernels().block_backward,
        *inputs,
        arrays.rows(out),
        arrays.floats(lse),
        arrays.rows(out_grad),
        *_arrays(gradients),
    )
    return _finish(gradients, q, k, v, key_bias)


def _gather_inputs(
    given: Iterable[Any], key_bias: Tensor | None, indices: Tensor, counts: Tensor | None, scale: float
) -> list[Any]:
    extras = [arrays.floats(key_bias), arrays.ints(indices), arrays.ints(counts)]
    return [*given, *extras, scale, torch.get_num_threads()]


def gather_attend(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, indices: Tensor, counts: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out and log Σ exp for each query's own list of keys: the first `counts` [B, H, N] of `indices` [B, H, N, m]."""
    inputs = _gather_inputs(map(arrays.heads, (q, k, v)), key_bias, indices, counts, scale)
    out, lse = arrays.results(q, v)
    arrays.call(kernels().gather_attend, *inputs, arrays.array(out), lse.numpy())
    return arrays.typed(out, q), lse


def gather_backward(
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
    """Gradients of q, k, v and key_bias; the last is empty unless `bias_grad` asks for it."""
    inputs = _gather_inputs(map(arrays.rows, (q, k, v)), key_bias, indices, counts, scale)
    gradients = _gradients(q, k, v, bias_grad)
    forward = [arrays.rows(out), arrays.floats(lse), arrays.rows(out_grad)]
    arrays.call(kernels().gather_backward, *inputs, *forward, *_arrays(gradients))
    return _finish(gradients, q, k, v, key_bias)


def sparsifiner_select(
    coefficients: Tensor,
    basis: Tensor,
    budget: int,
    prefix: int,
    tau: float,
    top: int,
) -> tuple[Tensor, Tensor]:
    """The keys of each query's largest connectivities: int32 [B, H, N, budget], ascending, and how many: [B, H, N].

    Coefficients count if they are above `tau` and, unless `top` is 0, among its `top` largest.
    """
    inputs = [arrays.rows(coefficients), arrays.tables(basis), budget, prefix, tau, top]
    room = min(max(budget, 0), coefficients.shape[2])  # a budget of more is refused
    indices = torch.empty(*coefficients.shape[:3], room, dtype=torch.int32)
    counts = torch.empty(coefficients.shape[:3], dtype=torch.int32)
    arrays.call(kernels().sparsifiner_select, *inputs, torch.get_num_threads(), indices.numpy(), counts.numpy())
    return indices, counts


def sparsifiner(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    coefficients: Tensor,
    basis: Tensor,
    tail_scores: Tensor | None,
    tail_values: Tensor | None,
    share: Tensor | None,
    budget: int,
    prefix: int,
    tau: float,
    top: int,
    scale: float,
) -> Tensor:
    """Choose as `sparsifiner_select` does and attend at once: out [B, H, N, ·]. No list outlives its query."""
    heads = [*map(arrays.heads, (q, k, v)), arrays.floats(key_bias), arrays.rows(coefficients), arrays.tables(basis)]
    tail = [*(None if x is None else arrays.rows(x) for x in (tail_scores, tail_values)), arrays.tables(share)]
    sizes = [budget, prefix, tau, top, scale, torch.get_num_threads()]
    out, lse = arrays.results(q, v)
    arrays.call(kernels().sparsifiner, *heads, *tail, *sizes, arrays.array(out), lse.numpy())
    return arrays.typed(out, q)


@lru_cache(maxsize=256)
def _merging(*plan: int) -> Merging:
    """To make and check a plan takes microseconds, and a model asks for the same few again and again."""
    return Merging(*plan)


def merge(
    x: Tensor,
    keys: Tensor,
    importance: Tensor | None,
    sizes: Tensor | None,
    cells: Tensor | None,
    owners: Tensor | None,
    plan: Sequence[int],
    protect: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `merging.merge`: what is left of x, its sizes, cells and owners. `plan` are the numbers of a `Merging`."""
    inputs = [
        arrays.tokens(x),
        arrays.rows(arrays.by_head(keys)),
        arrays.floats(importance),
        arrays.floats(sizes),
        arrays.longs(cells),
        arrays.longs(owners),
    ]
    shape = arrays.call(_merging, *plan)
    if shape.tokens != x.shape[1] or shape.cells > 2**24:
        given = f"a plan of {shape.tokens} tokens on {shape.cells} cells"
        raise UserError(f"merge: {given} does not fit x of {list(x.shape)}")
    B, _, C = x.shape
    out, total = torch.empty(B, shape.tokens - shape.r, C), torch.empty(B, shape.left)
    places, moved = (torch.empty(B, count, dtype=torch.int64) for count in (shape.left, shape.cells))
    results = [result.numpy() for result in (out, total, places, moved)]
    arrays.call(kernels().merge, *inputs, list(plan), protect, torch.get_num_threads(), *results)
    return arrays.typed(out, x), arrays.typed(total, x), places, moved
