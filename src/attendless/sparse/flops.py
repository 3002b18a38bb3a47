"""FLOP counts of the kernels' operations, for `FlopCounterMode`: two for a multiply-add.

The counts of foveal, Sparsifiner and merging are functions of shapes. Those of `block` and `gather` depend on the lists
of keys, so they take tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import foveal, merging
from .foveal import Layout
from .merging import Merging

Shape = Sequence[int]


def foveal_select(q: Shape, k: Shape, key_bias: Any, places: Any, layout: Sequence[int], *rest: Any) -> int:
    plan = Layout(*layout)
    return 2 * math.prod(q[:2]) * plan.tiles * plan.cells * q[3]


def foveal_attend(q: Shape, k: Shape, v: Shape, key_bias: Any, places: Any, layout: Sequence[int], *rest: Any) -> int:
    plan = Layout(*layout)
    return 2 * math.prod(q[:2]) * (_pairs(q, plan) * (q[3] + v[3]) + _slopes(q, plan) * q[3] * v[3])


def foveal_both(q: Shape, k: Shape, v: Shape, *rest: Any) -> int:
    return foveal_select(q, k, *rest) + foveal_attend(q, k, v, *rest)


def foveal_backward(
    out_grad: Shape, q: Shape, k: Shape, v: Shape, out: Shape, lse: Shape, key_bias: Any, places: Any,
    layout: Sequence[int], *rest: Any,
) -> int:  # fmt: skip
    plan = Layout(*layout)
    pairs = _pairs(q, plan) * (3 * q[3] + 2 * v[3])
    return 2 * math.prod(q[:2]) * (pairs + 5 * _slopes(q, plan) // 2 * q[3] * v[3])


def _pairs(q: Shape, plan: Layout) -> int:
    """Pairs of a query and a key it attends to, in one head."""
    patches = q[2] - plan.prefix
    return patches * foveal.keys_seen(plan, patches) + plan.prefix * q[2]


def _slopes(q: Shape, plan: Layout) -> int:
    """Outer products of a key and a value that the first-order correction takes, in one head."""
    return foveal.slope_macs(plan, q[2] - plan.prefix)


def block(q: Tensor, k: Tensor, v: Tensor, key_bias: Any, lists: Sequence[Tensor], *rest: Any) -> int:
    return 2 * _block_pairs(q, lists) * (q.shape[3] + v.shape[3])


def block_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_bias: Any,
    lists: Sequence[Tensor], *rest: Any,
) -> int:  # fmt: skip
    return 2 * _block_pairs(q, lists) * (3 * q.shape[3] + 2 * v.shape[3])


def _block_pairs(q: Tensor, lists: Sequence[Tensor]) -> int:
    """Pairs of a query and a key over all images and heads."""
    queries, keys = lists[0].diff(), lists[2].diff()
    heads = 1 if len(keys) == len(queries) else q.shape[1]
    return math.prod(q.shape[:2]) // heads * int((queries.repeat(heads).long() * keys.long()).sum())


def gather(q: Tensor, k: Tensor, v: Tensor, key_bias: Any, indices: Tensor, counts: Tensor | None, *rest: Any) -> int:
    return 2 * _listed(indices, counts) * (q.shape[3] + v.shape[3])


def gather_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_bias: Any,
    indices: Tensor, counts: Tensor | None, *rest: Any,
) -> int:  # fmt: skip
    return 2 * _listed(indices, counts) * (3 * q.shape[3] + 2 * v.shape[3])


def _listed(indices: Tensor, counts: Tensor | None) -> int:
    return indices.numel() if counts is None else int(counts.sum())


# An upper bound: small coefficients are skipped and lists may be shorter than the budget, which only values show.


def sparsifiner_select(coefficients: Shape, basis: Shape, budget: int, prefix: int, *rest: Any) -> int:
    B, H, N, R = coefficients
    return 2 * B * H * max(0, N - prefix) * R * N


def sparsifiner(
    q: Shape, k: Shape, v: Shape, key_bias: Any, coefficients: Shape, basis: Shape, tail_scores: Any, tail_values: Any,
    share: Any, budget: int, prefix: int, *rest: Any,
) -> int:  # fmt: skip
    B, H, N, R = coefficients
    patches = max(0, N - prefix)
    chosen = (patches * budget + (N - patches) * N) * (q[3] + v[3])
    tail = patches * R * v[3] if share else 0
    return sparsifiner_select(coefficients, basis, budget, prefix) + 2 * B * H * (chosen + tail)


def merge(
    x: Shape, keys: Shape, importance: Any, sizes: Any, cells: Any, owners: Any, plan: Sequence[int], *rest: Any
) -> int:
    return 2 * x[0] * merging.macs(Merging(*plan), keys[-1])
