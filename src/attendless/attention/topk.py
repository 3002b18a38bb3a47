"""Exact top-k: every query attends to the keys with its highest true scores. An oracle: all scores are computed.

    out_i = softmax over the ⌈keep · N⌉ largest q_i·k_j / √D + log s_j, times their values

N is the number of tokens of the whole grid, s the number of tokens that a key represents.

This is the upper bound for mechanisms that predict the keys. As in `sparsifiner`, prefix queries attend to every token,
and with `rest=pooled` the keys not chosen are replaced by `rank` averages over cells of the grid instead of being
dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from .. import options
from ..sparse import basis, topk
from ..sparse.backend import Choice
from . import averages
from .interface import Attention
from .registry import register
from .values import Context, Grid


@dataclasses.dataclass(frozen=True)
class Options(options.Options):
    keep: float = options.option(0.25, "share of the tokens that each query attends to", low=0, high=1)
    rest: Literal["dropped", "pooled"] = options.option("dropped", "treatment of the keys that are not chosen")
    rank: int = options.option(32, "number of averages for the pooled rest", low=1)


@register
class TopK(Attention):
    name = "topk"
    provides = frozenset({"class_attention", "keys"})
    Options = Options
    examples = ("topk", "topk:keep=0.1,rest=pooled,rank=9")
    executes_more = "plain PyTorch masks dense products"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, bias = context.grid, context.grid.key_bias(q.dtype)
        with torch.no_grad():  # selection has no gradient
            score = q @ k.transpose(-2, -1)
            score = score if bias is None else score + bias[:, None, None] / self.scale
            seen = topk.largest(score, averages.budget(self.options.keep, grid), prefix=grid.prefix)
        more = {"scale": self.scale, "key_bias": bias, "rest": self._rest(grid, k), "prefix": grid.prefix}
        return topk.attend(q, k, v, seen, dropout=self.dropout, **more), context

    def _rest(self, grid: Grid, like: Tensor) -> basis.Rest | None:
        if self.options.rest == "dropped":
            return None
        return averages.rest(grid, self.options.rank, like)

    def core_macs(self, grid: Grid) -> int:
        """MACs of every score, of the values of the chosen keys, and of the averages."""
        tokens, patches = grid.tokens, grid.patches
        attend = tokens * tokens + patches * averages.budget(self.options.keep, grid) + grid.prefix * tokens
        if self.options.rest == "pooled":
            attend += 2 * self.options.rank * (tokens + patches)
        return attend * self.attn_dim

    def refuses(self, grid: Grid) -> str | None:
        most = grid.whole().tokens
        if self.options.rest == "pooled" and not grid.prefix < self.options.rank <= most:
            return f"rank={self.options.rank} must be above {grid.prefix}, the prefix tokens, and at most {most}"
        return None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return Choice("torch", "an oracle: every score is computed before the largest are kept")
