"""The operations that attentions and reducers are made of. `dispatch` chooses the backend that computes each.

    full         softmax(q kᵀ) v by PyTorch's fused kernel, bit-identical to timm's
    remaining    full attention over the tokens that reducers left, each of which may stand for several; and in bf16
    foveal       each tile of queries attends to its chosen cells sharply and to the rest of the grid blurred
    block        each block of queries attends to the blocks of keys that a fixed pattern names
    gather       each query attends to a list of keys of its own
    sparsifiner  each query chooses keys by a predicted connectivity and attends to them
    merge        similar tokens are averaged

`foveal`, `blocks`, `gather`, `topk` and `merging` define what each computes, in readable and slow PyTorch. `table`
describes the operators of the compiled kernels.

Shapes: B batch · H heads · N tokens · D head width · q, k [B, H, N, D] · v [B, H, N, any].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import UserError
from . import basis, blocks, dispatch, patterns
from . import foveal as foveal_definition
from . import full as full_definition
from .backend import Case, Sample, sampled
from .basis import Rest
from .blocks import Plan, plan
from .foveal import Layout
from .full import Whole
from .merging import Merged, Merging


def case_of(op: str, plan: object, q: Tensor, dropout: float = 0.0) -> Case:
    """The case of a call with queries q [B, H, N, D]."""
    return Case(op, plan, _batch(q), q.shape[1], q.shape[3], q.dtype, q.device.type, dropout)


def _batch(x: Tensor) -> int:
    return 1 if torch.compiler.is_compiling() else len(x)  # symbolic while compiling: one graph serves every batch size


def remaining(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_bias: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Every query attends to every key, to whose score `key_bias` [B, N] is added."""
    if torch.compiler.is_compiling():  # compilers and other runtimes fuse full attention themselves
        return full_definition.attend(q, k, v, scale=scale, key_bias=key_bias, dropout=dropout)
    case = case_of("remaining", Whole(k.shape[2]), q, dropout)
    return dispatch.run(case, q, k, v, scale=scale, key_bias=key_bias)


def foveal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    places: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Choose cells and attend. `key_bias` [B, N] is added to the scores of a key; `places` [B, n] are the grid
    positions of the patches that a reducer left."""
    if layout.int8 and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UserError(
            "foveal:int8 has no gradient, and a tensor requires one: train without int8, evaluate under torch.no_grad()"
        )
    case = case_of("foveal", layout, q, dropout)
    return dispatch.run(case, q, k, v, scale=scale, key_bias=key_bias, places=places)


def block(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Each query attends to the keys its pattern shows it."""
    if dispatch.compiling():  # a graph would hold the lists of every layer as constants
        return blocks.attend(q, k, v, plan, scale=scale, dropout=dropout)
    return dispatch.run(case_of("block", plan, q, dropout), q, k, v, scale=scale)


@dataclasses.dataclass(frozen=True)
class Lists:
    """The plan of `gather`: the number of tokens and the most keys in a list."""

    tokens: int
    keys: int


def gather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attend to the first counts [B, H, N] keys of each query's indices [B, H, N, m], or to all of them.

    There are as many queries as keys: q, k [B, H, N, D], v [B, H, N, any].
    """
    lists = indices.shape[:3] if counts is None else counts.shape
    if not (k.shape == q.shape and q.shape[:3] == v.shape[:3] == indices.shape[:3] == lists):
        given = {"q": q, "k": k, "v": v, "indices": indices} | ({} if counts is None else {"counts": counts})
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        raise UserError(
            f"gather: {shapes} were given; expected as many queries as keys and a list for each query: q, k "
            "[B, H, N, D], v [B, H, N, any], indices [B, H, N, m], counts [B, H, N]"
        )
    case = case_of("gather", Lists(indices.shape[2], indices.shape[3]), q)
    return dispatch.run(case, q, k, v, indices, counts, scale=scale, key_bias=key_bias)


@dataclasses.dataclass(frozen=True)
class Guess:
    """How `sparsifiner` chooses: each query takes the `budget` keys of its largest connectivities; the first `prefix`
    queries take every key.

    Of `rank` coefficients those above `tau` count, or, unless it is 0, the `top` largest; at most `counting` of them.
    With `spare` a query fills its budget even with keys of connectivity 0. `masked`: the softmax is over the chosen
    keys, not over all keys.
    """

    tokens: int
    prefix: int
    rank: int
    budget: int
    tau: float
    top: int
    counting: int
    spare: bool = False
    masked: bool = True


def sparsifiner(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    guess: Guess,
    coefficients: Tensor,
    basis: Tensor,
    *,
    scale: float,
    rest: Rest | None = None,
    connectivity: Tensor | None = None,
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Choose keys by coefficients [B, H, N, R] × basis, and attend to them, and to the `rest` if there is one.

    The basis is [R, N], or [B, 1, R, N] with one for each image. With `connectivity` [B, H, N, N], the continuous
    values that the choice was made by, the choice has a gradient with respect to them.
    """
    case = case_of("sparsifiner", guess, q, dropout)
    more = {"scale": scale, "rest": rest, "connectivity": connectivity, "key_bias": key_bias}
    return dispatch.run(case, q, k, v, coefficients, basis, **more)


def merge(
    x: Tensor,
    keys: Tensor,
    plan: Merging,
    *,
    importance: Tensor | None = None,
    sizes: Tensor | None = None,
    cells: Tensor | None = None,
    owners: Tensor | None = None,
) -> Merged:
    """Average `plan.r` patches of x [B, N, C] with the patches of the most similar keys, as `merging.merge` does.

    Half-precision tokens are merged in fp32 and rounded once; sizes stay fp32.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        wide = x.float()
        importance = None if importance is None else importance.float()
        found = merge(
            wide,
            wide if keys is x else keys.float(),
            plan,
            importance=importance,
            sizes=None if sizes is None else sizes.float(),
            cells=cells,
            owners=owners,
        )
        return found._replace(x=found.x.to(x.dtype))
    case = Case("merge", plan, _batch(x), 1, keys.shape[-1], x.dtype, x.device.type)
    more = {"importance": importance, "sizes": sizes, "cells": cells, "owners": owners}
    return dispatch.run(case, x, keys, **more)


# Samples for cost measurements ---------------------------------------------------------------------------------------

#: Heads and head width of a small ViT.
_HEADS, _WIDTH = 3, 64
_SCALE = _WIDTH**-0.5


def _qkv(side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(side)
    packed = torch.randn(1, side * side, 3, _HEADS, _WIDTH, generator=draws).to(dtype)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


@sampled("full")
def _full_samples(side: int, dtype: torch.dtype) -> Iterator[Sample]:
    q, k, v = _qkv(side, dtype)
    yield Sample(case_of("full", Whole(side * side), q), lambda run: run(q, k, v, scale=_SCALE))


@sampled("remaining")
def _remaining_samples(side: int, dtype: torch.dtype) -> Iterator[Sample]:
    q, k, v = _qkv(side, dtype)
    bias = torch.zeros(1, side * side, dtype=dtype)
    yield Sample(case_of("remaining", Whole(side * side), q), lambda run: run(q, k, v, scale=_SCALE, key_bias=bias))


@sampled("foveal")
def _foveal_samples(side: int, dtype: torch.dtype) -> Iterator[Sample]:
    q, k, v = _qkv(side, dtype)
    for tile in (4, 1, 2):
        layout = foveal_definition.layout(side, side, keep=0.1, cell=2, tile=tile, coarse=0)
        yield Sample(case_of("foveal", layout, q), lambda run: run(q, k, v, scale=_SCALE, key_bias=None, places=None))


@sampled("block")
def _block_samples(side: int, dtype: torch.dtype) -> Iterator[Sample]:
    q, k, v = _qkv(side, dtype)
    for size in (4, 2):
        pattern = patterns.window_pattern(patterns.grid_blocks(side, side, 0, size), 1)
        yield Sample(case_of("block", plan(pattern, _HEADS), q), lambda run: run(q, k, v, scale=_SCALE))


@sampled("gather")
def _gather_samples(side: int, dtype: torch.dtype) -> Iterator[Sample]:
    q, k, v = _qkv(side, dtype)
    N = side * side
    lists = torch.rand(1, _HEADS, N, N, generator=torch.Generator().manual_seed(side)).argsort(-1)[..., : N // 10].int()
    case = case_of("gather", Lists(N, N // 10), q)
    yield Sample(case, lambda run: run(q, k, v, lists, None, scale=_SCALE, key_bias=None))


@sampled("sparsifiner")
def _sparsifiner_samples(side: int, dtype: torch.dtype) -> Iterator[Sample]:
    q, k, v = _qkv(side, dtype)
    N, rank = side * side, min(32, side * side // 4)
    down, up = (weight.to(dtype) for weight in basis.pooling(side, side, 0, rank))

    def coefficients() -> Tensor:  # prediction is part of the cost
        return torch.softmax(_SCALE * q @ (down @ k).transpose(-2, -1), dim=-1)

    guess = Guess(N, 0, rank, N // 10, 0.0, 0, rank)
    yield Sample(
        case_of("sparsifiner", guess, q),
        lambda run: run(q, k, v, coefficients(), up, scale=_SCALE, rest=None, connectivity=None, key_bias=None),
    )


@sampled("merge")
def _merge_samples(side: int, dtype: torch.dtype) -> Iterator[Sample]:
    draws, N = torch.Generator().manual_seed(side), side * side
    x = torch.randn(1, N, _HEADS * _WIDTH, generator=draws).to(dtype)
    keys = torch.randn(1, N, _WIDTH, generator=draws).to(dtype)
    nothing = dict.fromkeys(("importance", "sizes", "cells", "owners"))
    case = Case("merge", Merging(side, side, 0, N, N // 20), 1, 1, _WIDTH, dtype)
    yield Sample(case, lambda run: run(x, keys, **nothing))
