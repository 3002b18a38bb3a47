"""Full attention: every token attends to every token.

    out = softmax(q kᵀ / √D + log s) v

s is the number of tokens that a key represents: 1 unless tokens were merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sparse import dispatch, operations
from ..sparse.backend import Choice
from ..sparse.full import Whole
from ..sparse.full import attend as full
from ..sparse.full import macs as full_macs
from .interface import Attention
from .registry import register
from .values import Context, Grid


@register
class Full(Attention):
    name = "full"
    frames = True
    provides = frozenset({"scores", "class_attention", "keys"})
    takes = frozenset({"residual"})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        bias = context.grid.key_bias(q.dtype)
        if "scores" not in context.wants and context.residual is None:
            attend = operations.remaining if context.grid.reduced else full
            return attend(q, k, v, scale=self.scale, key_bias=bias, dropout=self.dropout), context
        # The scores are needed explicitly; the fused kernel would compute them a second time.
        scores = self.scale * q @ k.transpose(-2, -1)
        scores = scores if context.residual is None else scores + context.residual
        weights = torch.softmax(scores if bias is None else scores + bias[:, None, None], dim=-1)
        return torch.dropout(weights, self.dropout, self.training) @ v, context.replace(scores=scores)

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """softmax(q kᵀ / √D + residual + log s), computed directly."""
        q, k, _ = self.project(x)
        rows, bias = slice(query, query + 1) if isinstance(query, int) else query, context.grid.key_bias(q.dtype)
        score = self.scale * q[:, :, rows] @ k.transpose(-2, -1)
        score = score if context.residual is None else score + context.residual[:, :, rows]
        return torch.softmax(score if bias is None else score + bias[:, None, None], dim=-1)

    def core_macs(self, grid: Grid) -> int:
        return full_macs(grid.tokens, self.attn_dim)

    def refuses(self, grid: Grid) -> str | None:
        return None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        if not grid.reduced:
            return Choice("sdpa", "full attention runs in PyTorch's fused kernel")
        return dispatch.choose(self.case_of("remaining", Whole(grid.tokens), batch))
