"""Full attention: every token attends to every token.

    out = softmax(q kᵀ / √D + log s) v

s is the number of tokens that a key represents: 1 unless tokens were merged. Where training masks patches, the weights
are those of `masking.py`.
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
from .masking import masked_weights
from .registry import register
from .values import Context, Grid


@register
class Full(Attention):
    name = "full"
    frames = True
    provides = frozenset({"scores", "class_attention", "keys"})
    takes = frozenset({"residual"})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        if "scores" not in context.wants and context.residual is None and grid.weighting != "mask":
            attend = operations.remaining if _may_differ(grid, q.dtype) else full
            return attend(q, k, v, scale=self.scale, key_bias=grid.key_bias(q.dtype), dropout=self.dropout), context
        # The scores are needed explicitly; the fused kernel would compute them a second time.
        scores = self.scale * q @ k.transpose(-2, -1)
        scores = scores if context.residual is None else scores + context.residual
        weights = torch.dropout(_weights(scores, grid), self.dropout, self.training)
        return weights @ v, context.replace(scores=scores)

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """softmax(q kᵀ / √D + residual + log s), computed directly."""
        q, k, _ = self.project(x)
        rows = slice(query, query + 1) if isinstance(query, int) else query
        if context.grid.weighting == "mask":
            return _weights(self.scale * q @ k.transpose(-2, -1), context.grid)[:, :, rows]
        score = self.scale * q[:, :, rows] @ k.transpose(-2, -1)
        return _weights(score if context.residual is None else score + context.residual[:, :, rows], context.grid)

    def core_macs(self, grid: Grid) -> int:
        return full_macs(grid.tokens, self.attn_dim)

    def refuses(self, grid: Grid) -> str | None:
        return None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        case = self.case_of("remaining", Whole(grid.tokens), batch)
        if not _may_differ(grid, case.dtype):
            return Choice("sdpa", "full attention runs in PyTorch's fused kernel")
        return dispatch.choose(case)


def _may_differ(grid: Grid, dtype: torch.dtype) -> bool:
    """Whether outputs may differ from timm's in rounding: on reduced tokens, and in bf16, in which PyTorch's kernel is
    slow on CPUs. In fp32 on the whole grid they stay bit-identical."""
    return grid.reduced or dtype is torch.bfloat16


def _weights(scores: Tensor, grid: Grid) -> Tensor:
    """The weights for scores [B, H, queries, N]."""
    if grid.weighting == "mask" and grid.sizes is not None:
        return masked_weights(scores, torch.nn.functional.pad(grid.sizes, (grid.prefix, 0), value=1.0))
    bias = grid.key_bias(scores.dtype)
    return torch.softmax(scores if bias is None else scores + bias[:, None, None], dim=-1)
