"""Attention that computes only the pairs of a block pattern, without any N × N product, mask or map.

Queries that see every key share one product with all keys. Every other block of queries gathers the keys it sees, and
the softmax runs over these keys. Blocks with similar numbers of keys share a batched product: shorter lists are padded,
and the padding is masked. A query that sees no key gets zeros.

Shapes: B batch · H heads · N tokens · D head width · R rows (a row is one block of queries in one head) · a queries in
a row · m keys in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import fused
from .patterns import Pattern

#: Rows share a product while the shortest list has at least this share of the longest one's keys.
_ALIKE = 0.75
#: Keys gathered at a time on a CPU, so that the copies stay in its cache and its allocator's pool.
_GATHERED = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Rows with similar numbers of keys, the longest first. Tokens are numbered head · N + token."""

    queries: Tensor  # int64 [R, a]
    keys: Tensor  # int64 [R, m]
    real: Tensor  # bool [R, m]: which keys are not padding
    lengths: tuple[int, ...]  # the number of real keys of each row


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How to execute a pattern: what to gather, and where each result goes."""

    everything: Tensor  # int64 [n]: the tokens that see every token in all heads
    buckets: tuple[Bucket, ...]
    back: Tensor  # int64 [H · N]: the index of each token's result among those of `everything`, the buckets and a zero
    lists: tuple[Tensor, ...]  # the input of the native kernel, see `block_lists`
    edges: int  # number of pairs of a query and a visible key, over all heads

    @property
    def tokens(self) -> int:
        return len(self.lists[1])

    @property
    def block(self) -> float:
        """The average number of queries in a block, which share their keys."""
        return self.tokens / (len(self.lists[0]) - 1)

    @property
    def dense(self) -> bool:
        """Whether every query sees every key."""
        return len(self.everything) == self.tokens


@lru_cache(maxsize=256)
def plan(pattern: Pattern, heads: int) -> Plan:
    """The plan of a pattern, cached."""
    return fresh_plan(pattern, heads)


def fresh_plan(pattern: Pattern, heads: int) -> Plan:
    """An uncached plan, for compilers: a plan that was cached while tracing could hold fake tensors."""
    everything, buckets, back = _plan(pattern, heads)
    lists, edges = _listed(pattern, heads)
    return Plan(
        torch.from_numpy(everything),
        tuple(
            Bucket(torch.from_numpy(queries), torch.from_numpy(keys), torch.from_numpy(real), lengths)
            for queries, keys, real, lengths in buckets
        ),
        torch.from_numpy(back),
        tuple(map(torch.from_numpy, lists)),
        edges,
    )


def block_lists(pattern: Pattern) -> list[Tensor]:
    """A block pattern as the lists the kernel `block_attend` reads: int32 query_start, queries, key_start, keys.

    Each block of queries is a tile; its keys are listed token by token, for all heads or head by head.
    """
    return [torch.from_numpy(array) for array in block_arrays(pattern)]


def block_arrays(pattern: Pattern) -> list[np.ndarray]:
    """The same lists as NumPy arrays, which no tracer sees."""
    blocks = pattern.blocks
    key_start = np.concatenate([[0], np.cumsum(pattern.sees @ blocks.sizes)])
    tokens = [blocks.order[np.repeat(row, blocks.sizes)] for row in pattern.sees.reshape(-1, len(blocks))]
    arrays = (blocks.starts, blocks.order, key_start, np.concatenate(tokens))
    return [array.astype(np.int32) for array in arrays]


@lru_cache(maxsize=256)
def _listed(pattern: Pattern, heads: int) -> tuple[list[np.ndarray], int]:
    return block_arrays(pattern), pattern.edges(heads)


@lru_cache(maxsize=256)
def _plan(pattern: Pattern, heads: int) -> tuple[np.ndarray, list[tuple[Any, ...]], np.ndarray]:
    blocks = pattern.blocks
    N, sizes = blocks.tokens, blocks.sizes
    sees = np.broadcast_to(pattern.sees, (heads, len(blocks), len(blocks)))
    lengths = sees @ sizes
    whole = (lengths == N).all(axis=0)
    everything = blocks.order[np.repeat(whole, sizes)]
    rows = np.argwhere(~whole & (lengths > 0) & (sizes > 0))
    rows = rows[np.argsort(-lengths[tuple(rows.T)], kind="stable")]

    back = np.full(heads * N, -1)
    back.reshape(heads, N)[:, everything] = np.arange(heads * len(everything)).reshape(heads, -1)
    done, buckets = heads * len(everything), []
    for group in np.split(rows, _cuts(lengths[tuple(rows.T)])) if len(rows) else []:
        queries, asked = _pad([h * N + blocks.order[blocks.starts[g] : blocks.starts[g + 1]] for h, g in group])
        keys, real = _pad([h * N + blocks.order[np.repeat(sees[h, g], sizes)] for h, g in group])
        back[queries[asked]] = done + np.flatnonzero(asked)
        done += queries.size
        buckets.append((queries, keys, real, tuple(real.sum(axis=1).tolist())))
    back[back < 0] = done
    return everything, buckets, back


def _cuts(lengths: np.ndarray) -> list[int]:
    """Where a list of descending lengths is split, so that the lengths in each group are similar."""
    cuts, longest = [], lengths[0]
    for number, length in enumerate(lengths):
        if length < _ALIKE * longest:
            cuts.append(number)
            longest = length
    return cuts


def _pad(lists: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of numbers as one array, each padded with its own first number, and which entries are real."""
    real = np.arange(max(map(len, lists))) < np.array([[len(numbers)] for numbers in lists])
    padded = np.where(real, 0, np.array([[numbers[0]] for numbers in lists]))
    padded[real] = np.concatenate(lists)
    return padded, real


def large_products(q: Tensor) -> bool:
    """Whether to compute everything at once: faster on a GPU, and a compiler would unroll a loop."""
    return q.device.type != "cpu" or torch.compiler.is_compiling()


def few_at_a_time(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], images: int, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """`run(q, k, v)`; on a CPU, `images` images at a time, so that intermediate results stay in the cache."""
    if large_products(q) or images >= len(q):
        return run(q, k, v)
    parts = zip(*(x.split(max(1, images)) for x in (q, k, v)), strict=True)
    return torch.cat([run(*part) for part in parts])


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, dropout: float = 0.0) -> Tensor:
    """q, k [B, H, N, D] and v [B, H, N, ·] → [B, H, N, ·]: each query attends to the keys that the pattern allows."""
    if len(plan.everything) == q.shape[2]:
        return fused.attend(q, k, v, scale=scale, dropout=dropout)
    at_once = _GATHERED
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        # The gradient of a gather is as large as its whole source, so gather more at a time.
        at_once = max(_GATHERED, q.shape[1] * q.shape[2])
    run = partial(_gather_and_attend, plan=plan, scale=scale, dropout=dropout, at_once=at_once)
    gathered = sum(bucket.keys.numel() for bucket in plan.buckets)
    return few_at_a_time(run, at_once // max(1, gathered), q, k, v)


def _gather_and_attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, dropout: float, at_once: int
) -> Tensor:
    """Gather about `at_once` keys at a time, attend, and put the results in order."""

    def attend(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        mask = None if real is None else real[None, :, None, :]
        out = fused.attend(q, k, v, mask, scale=scale, dropout=dropout)
        return out.flatten(1, 2)

    def take(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(1, index.flatten()).unflatten(1, index.shape)

    B, H, N, _ = q.shape
    device = q.device
    q_rows, k_rows, v_rows = (x.flatten(1, 2) for x in (q, k, v))
    results = [attend(q.index_select(2, plan.everything.to(device)), k, v)] if len(plan.everything) else []
    for bucket in plan.buckets:
        R, m = bucket.keys.shape
        step = R if large_products(q) else max(1, at_once // max(1, B * m))
        for start in range(0, R, step):
            some = slice(start, start + step)
            longest, shortest = bucket.lengths[some][0], bucket.lengths[some][-1]
            queries, keys = bucket.queries[some].to(device), bucket.keys[some, :longest].to(device)
            real = bucket.real[some, :longest].to(device) if shortest < longest else None
            results.append(attend(take(q_rows, queries), take(k_rows, keys), take(v_rows, keys), real))
    nothing = v.new_zeros(B, 1, v.shape[-1], dtype=results[0].dtype if results else v.dtype)
    return torch.cat([*results, nothing], dim=1).index_select(1, plan.back.to(device)).unflatten(1, (H, N))
