"""Sparsifiner: a small predictor selects keys for every query and head; queries attend only to those.

    s = [A]_{>τ} [W_up]_{>basis}                connectivity: sparse coefficients × a sparse basis
    chosen_i = the ⌈keep · N⌉ largest s_ij > 0, N tokens of the whole grid
    out_i = softmax over the chosen keys of q_i·k_j / √D, times their values

A and W_up are the predictor's (`attention.predictor`). Class and register queries attend to every token, as the class
token does in the paper. `softmax=full` takes the softmax over all keys and then drops those not chosen, as in the
paper's fourth equation; its code follows the equations above. With `rest=pooled` the keys not chosen are not dropped
but replaced by R averages of keys and values over cells of the grid, those that W_down starts from.

On a reduced grid every image has a basis of its own, and keys are weighted by the number of tokens they represent.

Shapes: B batch · H heads · N tokens · R rank · D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..sparse import basis, operations
from ..sparse.backend import Case, backend
from . import averages
from .predictor import Options, PredictingAttention
from .registry import register
from .values import Context, Grid


@register
class Sparsifiner(PredictingAttention):
    name = "sparsifiner"
    provides = frozenset({"class_attention", "keys"})
    examples = (
        "sparsifiner:rank=8",
        "sparsifiner:keep=0.1,rank=12,rest=pooled",
        "sparsifiner:rank=9,softmax=full,tau=0",
        "sparsifiner:rank=8,variant=released,top=3",
    )
    executes_more = "plain PyTorch masks dense products, and how many coefficients exceed tau depends on the image"

    @property
    def rows_sum_to_one(self) -> bool:  # type: ignore[override]
        """With `softmax=full` the weights of keys that were not chosen are missing from a row."""
        return bool(self.options.softmax == "masked")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        with torch.no_grad():  # selection has no gradient of its own: see `topk.learnable`
            coefficients, connects = self.coefficients(q, k, grid), self.sparse_basis(grid)
        connectivity = None
        if torch.is_grad_enabled() and self.up.requires_grad:
            connectivity = self.connectivity(q.detach(), k.detach(), grid)
        out = operations.sparsifiner(
            q,
            k,
            v,
            self.guess(grid),
            coefficients,
            connects,
            scale=self.scale,
            rest=self.rest(grid, k),
            connectivity=connectivity,
            key_bias=grid.key_bias(q.dtype),
            dropout=self.dropout,
        )
        return out, context

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """The keys that each query attends to: bool [B, H, N, N]. Quadratic in N; kernels use lists instead."""
        guess = self.coefficients(q, k, grid), self.sparse_basis(grid)
        return _torch().select(self.guess(grid), *guess)

    def sees(self, x: Tensor, context: Context, query: int) -> Tensor:
        """The keys chosen for the query, without the averages of the rest."""
        if query < context.grid.prefix:
            return super().sees(x, context, query)
        q, k, _ = self.project(x)
        return self.select(q, k, context.grid)[:, :, query]

    def guess(self, grid: Grid) -> operations.Guess:
        """The parameters of the selection on `grid`."""
        return _guess(grid.tokens, grid.prefix, averages.budget(self.options.keep, grid), self.options)

    def rest(self, grid: Grid, like: Tensor) -> basis.Rest | None:
        """The averages that replace the keys not chosen, or None if these are dropped."""
        if self.options.rest == "dropped":
            return None
        return averages.rest(grid, self.options.rank, like)

    def case(self, grid: Grid, batch: int = 1) -> Case:
        return self.case_of("sparsifiner", self.guess(grid), batch)

    def refuses(self, grid: Grid) -> str | None:
        if grid.prefix != self.grid.prefix:
            return f"its predictor was made for {self.grid.prefix} prefix tokens"
        most = grid.whole().tokens
        if not grid.prefix < self.options.rank <= most:
            return f"rank={self.options.rank} must be above {grid.prefix}, the prefix tokens, and at most {most}"
        return None

    def core_macs(self, grid: Grid) -> int:
        """MACs of the averages of keys, low-rank scores, connectivity, and chosen keys; at most 1/τ coefficients
        exceed τ. `softmax=full` computes every score.
        """
        rank, tokens, patches = self.options.rank, grid.tokens, grid.patches
        width = self.attn_dim // 2 if self.released else self.attn_dim
        predict = rank * (tokens + patches) * width
        if self.released:
            predict += 2 * tokens * self.attn_dim * (self.head_dim // 2)
        predict += self.num_heads * patches * self._connectivity_macs(grid)
        seen = self.guess(grid).budget
        scores = tokens if self.options.softmax == "full" else seen
        attend = (patches * (scores + seen) + 2 * grid.prefix * tokens) * self.attn_dim
        if self.options.rest == "pooled":
            # Averages of keys and values; their scores and values.
            attend += 2 * rank * (tokens + patches) * self.attn_dim
        return predict + attend

    def _connectivity_macs(self, grid: Grid) -> int:
        """MACs of one query: its coefficients times the non-zero entries of the basis, whose density is that of the
        whole grid."""
        whole = grid.whole()
        with torch.no_grad():
            entries = self.sparse_basis(whole)
        # Weights on the meta device have no values: count every entry.
        filled = entries.numel() if entries.is_meta else int(entries.count_nonzero())
        filled = filled * grid.tokens // whole.tokens
        return self.guess(grid).counting * filled // self.options.rank


def _torch() -> Any:
    return backend("sparsifiner", "torch")


def _guess(tokens: int, prefix: int, budget: int, options: Options) -> operations.Guess:
    released = options.variant == "released"
    top = options.top or (8 if released else 0)
    tau = 0.0 if top else options.tau
    # Coefficients sum to 1, so at most 1/τ exceed τ.
    counting = min(options.rank, top or (options.rank if tau == 0 else math.ceil(1 / tau) - 1))
    return operations.Guess(
        tokens,
        prefix,
        options.rank,
        budget,
        tau,
        top,
        counting,
        spare=released,
        masked=options.softmax == "masked",
    )
