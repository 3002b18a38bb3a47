"""The compiled kernels: CPU, forward and backward, in fp32, and forward in bf16 as `sparse.bf16` defines.

`sparse.table` describes their operators.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ... import compiled
from .. import foveal, full, merging, ops, topk  # noqa: F401 - `ops` registers torch.ops.attendless
from ..backend import Backend, Case, register_backend
from ..basis import Rest
from ..merging import Merged
from .pytorch import attend_chosen

#: The most tiles of queries into which full attention is cut: enough for threads, and each has a list of all keys.
_TILES = 16


class NativeBackend(Backend):
    """What the backends of the kernels share."""

    name, about, standing, devices = "native", "compiled kernels", 2, ("cpu",)

    def refuses(self, case: Case) -> str:
        if not compiled.available:
            return compiled.reason
        if case.dtype == torch.float64:
            return "the native kernels compute in fp32"
        if case.dropout:
            return "the native kernels do not drop attention weights at random"
        return ""


@register_backend
class RemainingNatively(NativeBackend):
    """Full attention as a block pattern in which every query sees every key. With gradients, PyTorch computes."""

    op = "remaining"

    def macs(self, case: Case) -> int:
        return case.batch * full.macs(case.plan.tokens, case.dim)

    def run(self, case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_bias: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, key_bias)):
            return full.attend(q, k, v, scale=scale, key_bias=key_bias)
        return torch.ops.attendless.block_attend(q, k, v, key_bias, _all_pairs(case.plan.tokens), scale)[0]


@lru_cache(maxsize=256)
def _all_pairs(tokens: int) -> list[Tensor]:
    """The lists of a block pattern in which each tile of queries sees every key."""
    tile = max(64, -(-tokens // _TILES))
    starts, every = [*range(0, tokens, tile), tokens], torch.arange(tokens, dtype=torch.int32)
    tiles = len(starts) - 1
    ends = torch.arange(0, (tiles + 1) * tokens, tokens, dtype=torch.int32)
    return [torch.tensor(starts, dtype=torch.int32), every, ends, every.repeat(tiles)]


@register_backend
class FovealNatively(NativeBackend):
    op = "foveal"

    def line(self, case: Case) -> str:
        """The fewer queries share their keys, the more memory each loads."""
        return {1: "alone", 2: "few"}.get(case.plan.tile, "")

    def macs(self, case: Case) -> int:
        return case.batch * foveal.macs(case.plan, case.dim, case.width)

    def run(
        self,
        case: Case,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        key_bias: Tensor | None,
        places: Tensor | None,
    ) -> Tensor:
        inputs = (q, k, v, key_bias, places, list(case.plan.sizes), scale)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:4]):
            return torch.ops.attendless.foveal(*inputs)[0]
        return torch.ops.attendless.foveal_forward(*inputs)


@register_backend
class BlockNatively(NativeBackend):
    op = "block"

    def refuses(self, case: Case) -> str:
        if case.plan.dense:
            return "every query sees every key: that is full attention"
        return super().refuses(case)

    def line(self, case: Case) -> str:
        return "few" if case.plan.block <= 4 else ""

    def macs(self, case: Case) -> int:
        return 2 * case.batch * case.plan.edges * case.width

    def run(self, case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        return torch.ops.attendless.block_attend(q, k, v, None, list(case.plan.lists), scale)[0]


@register_backend
class GatherNatively(NativeBackend):
    op = "gather"

    def macs(self, case: Case) -> int:
        return 2 * case.batch * case.plan.tokens * case.plan.keys * case.dim

    def run(
        self,
        case: Case,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        counts: Tensor | None,
        *,
        scale: float,
        key_bias: Tensor | None,
    ) -> Tensor:
        return torch.ops.attendless.gather_attend(q, k, v, key_bias, indices, counts, scale)[0]


@register_backend
class SparsifinerNatively(NativeBackend):
    """Chooses keys and attends in one pass. With gradients, another kernel attends to the lists it chooses."""

    op = "sparsifiner"

    def refuses(self, case: Case) -> str:
        if case.plan.spare or not case.plan.masked:
            return "the kernel computes the paper's predictor, and softmax over the chosen keys"
        return super().refuses(case)

    def macs(self, case: Case) -> int:
        guess = case.plan
        added = case.heads * guess.counting  # rows of the basis, for each token
        return case.batch * guess.tokens * (2 * (guess.budget + guess.rank) * case.dim + guess.tokens * added)

    def run(
        self,
        case: Case,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        coefficients: Tensor,
        basis: Tensor,
        *,
        scale: float,
        rest: Rest | None,
        connectivity: Tensor | None,
        key_bias: Tensor | None,
    ) -> Tensor:
        guess, basis = case.plan, _tables(basis)
        limits = (guess.budget, guess.prefix, guess.tau, guess.top)
        learns = connectivity is not None or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
        if not learns:
            tail: tuple[Any, ...] = (None, None, None)
            if rest is not None:
                *pooled, share = rest.tail(q, k, v, scale)
                tail = (*pooled, _tables(share))
            return torch.ops.attendless.sparsifiner(q, k, v, key_bias, coefficients, basis, *tail, *limits, scale)
        with torch.no_grad():
            lists = torch.ops.attendless.sparsifiner_select(coefficients, basis, *limits)
        if rest is not None or connectivity is not None:
            indices, counts = lists
            chosen = topk.unlisted(indices, counts, guess.tokens, guess.prefix)
            return attend_chosen(
                case, q, k, v, chosen, scale=scale, rest=rest, connectivity=connectivity, key_bias=key_bias
            )
        # Prefix queries see every key and have no lists.
        first = full.attend(q[:, :, : guess.prefix], k, v, scale=scale, key_bias=key_bias)
        others = torch.ops.attendless.gather_attend(q, k, v, key_bias, *lists, scale)[0][:, :, guess.prefix :]
        return torch.cat([first, others], dim=2)


def _tables(x: Tensor) -> Tensor:
    """[R, N] for all images, or [B, 1, R, N] as the kernel reads it: [B, R, N]."""
    return x if x.ndim == 2 else x.squeeze(1)


@register_backend
class MergeNatively(NativeBackend):
    """For inference. With gradients, the definition computes."""

    op = "merge"

    def refuses(self, case: Case) -> str:
        if case.dtype != torch.float32:
            return "the native kernel merges fp32"
        return super().refuses(case)

    def macs(self, case: Case) -> int:
        return case.batch * merging.macs(case.plan, case.width)

    def run(
        self,
        case: Case,
        x: Tensor,
        keys: Tensor,
        *,
        importance: Tensor | None,
        sizes: Tensor | None,
        cells: Tensor | None,
        owners: Tensor | None,
    ) -> Merged:
        plan, learning = case.plan, [y for y in (x, sizes) if y is not None and y.requires_grad]
        if learning and torch.is_grad_enabled():
            past = {"sizes": sizes, "cells": cells, "owners": owners}
            return merging.merge(x, keys, plan, importance=importance, **past)
        importance = None if importance is None else importance.detach()  # a choice has no gradient
        given = (importance, sizes, cells, owners)
        return Merged(*torch.ops.attendless.merge(x, keys.detach(), *given, plan.numbers, plan.protect))
