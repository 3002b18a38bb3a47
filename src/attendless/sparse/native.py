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

from ..compiled import available, forced, instruction_set, instruction_sets, kernels, reason
from ..errors import UserError
from .merging import Merging

__all__ = ["available", "forced", "instruction_set", "instruction_sets", "reason"]


def threading() -> str:
    """Why threads are started anew for each call, some 20 µs each; empty if they are those of PyTorch's OpenMP."""
    return str(kernels().why_own_threads()) if available else ""


# Tensors in, tensors out ---------------------------------------------------------------------------------------------


_FLOAT = (torch.float32,)
_FORWARD = (torch.float32, torch.bfloat16)


def _heads(x: Tensor) -> Any:
    """What a forward pass takes: as `_rows`, or of bfloat16."""
    return _rows(x, _FORWARD)


def _rows(x: Tensor, types: Sequence[torch.dtype] = _FLOAT) -> Any:
    """[B, H, N, ·] as an array of 32-bit floats with adjacent channels; no copy if it is one already."""
    if x is None or x.ndim != 4:  # an operator hands on None, whatever its signature says
        given = None if x is None else list(x.shape)
        raise UserError(f"the native kernels take [batch, heads, tokens, channels], not {given}")
    return _channels(x, types)


def _channels(x: Tensor, types: Sequence[torch.dtype] = _FLOAT) -> Any:
    if x.dtype not in types:
        x = _within_reason(x).float()
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = _within_reason(x).contiguous()
    return _array(x.detach())


def _array(x: Tensor) -> Any:
    """NumPy knows no bfloat16: the kernels take its bits."""
    return x.view(torch.int16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


def _tokens(x: Tensor) -> Any:
    """[B, N, ·] as such an array."""
    if x is None or x.ndim != 3:
        given = None if x is None else list(x.shape)
        raise UserError(f"merging takes [batch, tokens, channels], not {given}")
    return _channels(x)


def _by_head(keys: Tensor) -> Tensor:
    """Keys [B, N, D] as those of one head; anything else is left to be judged."""
    return keys[:, None] if keys is not None and keys.ndim == 3 else keys


def _within_reason(x: Tensor) -> Tensor:
    """Asked before a copy is made: an expanded tensor has any size and no memory."""
    if x.numel() > 2**31:
        raise UserError(f"a tensor of {list(x.shape)} is too large for the native kernels")
    return x


def _floats(x: Tensor | None) -> Any:
    if x is None:
        return None
    if x.dtype is not torch.float32 or not x.is_contiguous():  # to ask costs less than to convert what is right
        x = _within_reason(x).to(torch.float32).contiguous()
    return x.detach().numpy()


def _tables(x: Tensor | None) -> Any:
    """[rows, columns], or such a table for each image, as [1 or B, rows, columns]."""
    return _floats(x if x is None or x.ndim != 2 else x[None])


def _ints(x: Tensor | None) -> Any:
    """Numbers of tokens and the like in 32 bits. What does not fit becomes the largest or smallest that does: as wrong
    as it was, where cutting it off could make it right."""
    if x is None:
        return None
    if x.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise UserError(f"expected a tensor of int32 or int64 numbers, got {x.dtype}")
    if _within_reason(x).dtype is torch.int64:
        x = x.clamp(-(2**31), 2**31 - 1)
    return x.detach().to(torch.int32).contiguous().numpy()


def _longs(x: Tensor | None) -> Any:
    """Numbers of cells and tokens as PyTorch's own functions have them, in 64 bits."""
    if x is None:
        return None
    if x.dtype is not torch.int64:
        raise UserError(f"expected a tensor of int64 numbers, got {x.dtype}")
    return _within_reason(x).detach().contiguous().numpy()


def _room(like: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    B, H, N, _ = like.shape
    return torch.empty((B, N, H, width), dtype=dtype).transpose(1, 2)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = q.dtype if q.dtype in _FORWARD else torch.float32
    return _room(q, v.shape[-1], dtype), torch.empty(q.shape[:3], dtype=torch.float32)


def _typed(x: Tensor, like: Tensor) -> Tensor:
    return x if like.dtype is x.dtype else x.to(like.dtype)


def _chosen(q: Tensor, layout: Sequence[int]) -> Tensor:
    tiles = _call(kernels().foveal_tiles, layout)
    return torch.empty(*q.shape[:2], tiles, layout[6], dtype=torch.int32)


def _call(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(f"{function.__name__}: {error}") from None
    except TypeError:
        given = [list(x.shape) if hasattr(x, "shape") else x for x in arguments]
        raise UserError(f"{function.__name__} does not take arguments of these shapes: {given}") from None


def _foveal_inputs(
    arrays: Iterable[Any], key_bias: Tensor | None, places: Tensor | None, layout: Sequence[int], scale: float
) -> list[Any]:
    extras = [_floats(key_bias), _ints(places)]
    return [*arrays, *extras, layout, scale, torch.get_num_threads()]


def foveal_select(
    q: Tensor, k: Tensor, key_bias: Tensor | None, places: Tensor | None, layout: Sequence[int], scale: float
) -> Tensor:
    """The cells each tile looks at closely: int32 [B, H, T, M], ascending."""
    inputs = _foveal_inputs(map(_heads, (q, k)), key_bias, places, layout, scale)
    chosen = _chosen(q, layout)
    _call(kernels().foveal_select, *inputs, chosen.numpy())
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
    return _foveal(q, k, v, key_bias, places, layout, scale, _ints(chosen), select=False)


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
    _heads(q)  # in doubt it says what is wrong with its shape
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
    inputs = _foveal_inputs(map(_heads, (q, k, v)), key_bias, places, layout, scale)
    out, lse = _results(q, v)
    _call(kernels().foveal_attend, *inputs, chosen, select, _array(out), lse.numpy())
    return _typed(out, q), lse


def _gradients(q: Tensor, k: Tensor, v: Tensor, bias_grad: bool) -> list[Tensor]:
    """Room for the gradients of q, k, v and, head by head, of key_bias: none, unless asked for."""
    return [*(_room(x, x.shape[-1]) for x in (q, k, v)), torch.empty(q.shape[:3] if bias_grad else 0)]


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
    inputs = _foveal_inputs(map(_rows, (q, k, v)), key_bias, places, layout, scale)
    gradients = _gradients(q, k, v, bias_grad)
    forward = [_ints(chosen), _rows(out), _floats(lse)]
    _call(kernels().foveal_backward, *inputs, *forward, _rows(out_grad), *_arrays(gradients))
    return _finish(gradients, q, k, v, key_bias)


def _block_inputs(arrays: Iterable[Any], key_bias: Tensor | None, lists: Sequence[Tensor], scale: float) -> list[Any]:
    extras = [_floats(key_bias), *(_ints(x) for x in lists)]
    return [*arrays, *extras, scale, torch.get_num_threads()]


def block_attend(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, lists: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """out and log Σ exp for fixed lists of keys: `lists` are query_start, queries, key_start and keys of the tiles."""
    inputs = _block_inputs(map(_heads, (q, k, v)), key_bias, lists, scale)
    out, lse = _results(q, v)
    _call(kernels().block_attend, *inputs, _array(out), lse.numpy())
    return _typed(out, q), lse


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
    inputs = _block_inputs(map(_rows, (q, k, v)), key_bias, lists, scale)
    gradients = _gradients(q, k, v, bias_grad)
    _call(kernels().block_backward, *inputs, _rows(out), _floats(lse), _rows(out_grad), *_arrays(gradients))
    return _finish(gradients, q, k, v, key_bias)


def _gather_inputs(
    arrays: Iterable[Any], key_bias: Tensor | None, indices: Tensor, counts: Tensor | None, scale: float
) -> list[Any]:
    extras = [_floats(key_bias), _ints(indices), _ints(counts)]
    return [*arrays, *extras, scale, torch.get_num_threads()]


def gather_attend(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, indices: Tensor, counts: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out and log Σ exp for each query's own list of keys: the first `counts` [B, H, N] of `indices` [B, H, N, m]."""
    inputs = _gather_inputs(map(_heads, (q, k, v)), key_bias, indices, counts, scale)
    out, lse = _results(q, v)
    _call(kernels().gather_attend, *inputs, _array(out), lse.numpy())
    return _typed(out, q), lse


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
    inputs = _gather_inputs(map(_rows, (q, k, v)), key_bias, indices, counts, scale)
    gradients = _gradients(q, k, v, bias_grad)
    forward = [_rows(out), _floats(lse), _rows(out_grad)]
    _call(kernels().gather_backward, *inputs, *forward, *_arrays(gradients))
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
    inputs = [_rows(coefficients), _tables(basis), budget, prefix, tau, top]
    room = min(max(budget, 0), coefficients.shape[2])  # a budget of more is refused
    indices = torch.empty(*coefficients.shape[:3], room, dtype=torch.int32)
    counts = torch.empty(coefficients.shape[:3], dtype=torch.int32)
    _call(kernels().sparsifiner_select, *inputs, torch.get_num_threads(), indices.numpy(), counts.numpy())
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
    heads = [*map(_heads, (q, k, v)), _floats(key_bias), _rows(coefficients), _tables(basis)]
    tail = [*(None if x is None else _rows(x) for x in (tail_scores, tail_values)), _tables(share)]
    sizes = [budget, prefix, tau, top, scale, torch.get_num_threads()]
    out, lse = _results(q, v)
    _call(kernels().sparsifiner, *heads, *tail, *sizes, _array(out), lse.numpy())
    return _typed(out, q)


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
        _tokens(x),
        _rows(_by_head(keys)),
        _floats(importance),
        _floats(sizes),
        _longs(cells),
        _longs(owners),
    ]
    shape = _call(_merging, *plan)
    if shape.tokens != x.shape[1] or shape.cells > 2**24:
        given = f"a plan of {shape.tokens} tokens on {shape.cells} cells"
        raise UserError(f"merge: {given} does not fit x of {list(x.shape)}")
    B, _, C = x.shape
    out, total = torch.empty(B, shape.tokens - shape.r, C), torch.empty(B, shape.left)
    places, moved = (torch.empty(B, count, dtype=torch.int64) for count in (shape.left, shape.cells))
    results = [result.numpy() for result in (out, total, places, moved)]
    _call(kernels().merge, *inputs, list(plan), protect, torch.get_num_threads(), *results)
    return _typed(out, x), _typed(total, x), places, moved
