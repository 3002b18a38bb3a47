"""Plain PyTorch: the definitions, for every device and dtype, with dropout and gradients.

Foveal attention and Sparsifiner mask N × N products; block patterns gather keys and batch products. In graphs for other
runtimes, which have no kernel for it, foveal attention gathers its keys too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import bf16, blocks, foveal, foveal_gathered, full, gather, merging, topk
from ..backend import Backend, Case, register_backend
from ..basis import Rest
from ..merging import Merged


@register_backend
class FullInTorch(Backend):
    op, name, about, standing = "full", "sdpa", "PyTorch's fused kernel", 1

    def macs(self, case: Case) -> int:
        return case.batch * full.macs(case.plan.tokens, case.dim)

    def run(
        self, case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_bias: Tensor | None = None
    ) -> Tensor:
        return full.attend(q, k, v, scale=scale, key_bias=key_bias, dropout=case.dropout)


@register_backend
class RemainingInTorch(FullInTorch):
    op = "remaining"


@register_backend
class FovealInTorch(Backend):
    op, name, about, standing = "foveal", "torch", "N × N products with a mask", 1
    select = staticmethod(foveal.select)

    def macs(self, case: Case) -> int:
        layout = case.plan
        keys = layout.tokens + layout.cells + layout.coarse_cells
        first_order = 2 * case.width * layout.patches * len(layout.levels) if layout.order else 0
        return case.batch * case.dim * (layout.tiles * layout.cells + 2 * layout.tokens * keys + first_order)

    def run(self, case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **where: Any) -> Tensor:
        if case.plan.int8:
            chosen = self.select(q, k, case.plan, scale=scale, **where)
            return bf16.foveal_attend(q, k, v, chosen, case.plan, scale=scale, **where)
        whole = all(value is None for value in where.values())
        if torch.compiler.is_exporting() and whole and foveal_gathered.pays(case.plan):
            return foveal_gathered.attend(q, k, v, case.plan, scale=scale)
        chosen = self.select(q, k, case.plan, scale=scale, **where)
        return foveal.attend(q, k, v, chosen, case.plan, scale=scale, dropout=case.dropout, **where)


@register_backend
class BlockInTorch(Backend):
    op, name, about, standing = "block", "torch", "gathered keys, batched products", 1

    def macs(self, case: Case) -> int:
        return 2 * case.batch * case.plan.edges * case.width

    def run(self, case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        return blocks.attend(q, k, v, case.plan, scale=scale, dropout=case.dropout)


@register_backend
class GatherInTorch(Backend):
    op, name, about, standing = "gather", "torch", "a copy of every listed key", 1

    def macs(self, case: Case) -> int:
        return 2 * case.batch * case.plan.tokens * case.plan.keys * case.dim

    def run(self, case: Case, *tensors: Any, **more: Any) -> Tensor:
        return gather.attend(*tensors, **more)


@register_backend
class SparsifinerInTorch(Backend):
    op, name, about, standing = "sparsifiner", "torch", "N × N products with a mask", 1

    def macs(self, case: Case) -> int:
        tokens = case.plan.tokens
        return 2 * case.batch * tokens * (tokens + case.plan.rank) * case.dim

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
        chosen = self.select(case.plan, coefficients, basis)
        return attend_chosen(
            case, q, k, v, chosen, scale=scale, rest=rest, connectivity=connectivity, key_bias=key_bias
        )

    @torch.no_grad()
    def select(self, guess: Any, coefficients: Tensor, basis: Tensor) -> Tensor:
        found = topk.sparse(coefficients, tau=guess.tau, top=guess.top) @ basis
        above = -torch.inf if guess.spare else 0.0
        return topk.largest(found, guess.budget, prefix=guess.prefix, above=above)


@register_backend
class MergeInTorch(Backend):
    op, name, about, standing = "merge", "torch", "every source compared with every target", 1

    def macs(self, case: Case) -> int:
        sources = case.plan.seeking
        return case.batch * sources * (case.plan.patches - sources) * case.width

    def run(self, case: Case, x: Tensor, keys: Tensor, **more: Tensor | None) -> Merged:
        return merging.merge(x, keys, case.plan, **more)


def attend_chosen(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    rest: Rest | None,
    connectivity: Tensor | None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """The second half of Sparsifiner: attend to the chosen keys, bool [B, H, N, N]."""
    prefix = case.plan.prefix
    if connectivity is not None:
        chosen = topk.learnable(chosen, connectivity, prefix=prefix)
    if not case.plan.masked:
        return topk.attend_after_softmax(q, k, v, chosen, scale=scale, key_bias=key_bias, dropout=case.dropout)
    return topk.attend(q, k, v, chosen, scale=scale, key_bias=key_bias, rest=rest, prefix=prefix, dropout=case.dropout)
