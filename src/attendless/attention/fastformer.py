"""Fastformer's additive attention: one global query, one global key, and no pairs of tokens at all.

    α = softmax_n(w_q·q_n / √D)      g = Σ_n α_n q_n        the global query
    p_n = g ⊙ k_n
    β = softmax_n(w_k·p_n / √D)      h = Σ_n β_n p_n        the global key
    out_n = W (h ⊙ v_n) + q_n                               W is `proj`

Per head, but for W. Cost is linear in the tokens. `plain` sums the keys themselves, h = Σ β_n k_n, as the code of the
fair comparison does: its numbers for "AA" (4.394 G at patch 4) belong to `fastformer:plain`, and cost the same. The
paper's experiments share the weights of q and v; here, as in the comparison, v has its own. There are no token-to-token
weights, so attention dropout has no effect.

Prefix tokens are treated like patches. A token that represents s tokens counts s times.
Shapes: B batch · H heads · N tokens · D head width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .. import options
from ..errors import UserError
from .interface import Attention
from .registry import register
from .values import Context, Grid


def token_weights(x: Tensor, direction: Tensor, *, scale: float, key_bias: Tensor | None = None) -> Tensor:
    """x [B, H, N, D], direction [H, D], key_bias [B, N] → softmax over the tokens of x·direction [B, H, 1, N]."""
    scores = (scale * x @ direction.unsqueeze(-1)).transpose(-2, -1)
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :]
    return torch.softmax(scores, dim=-1)


def global_key(
    q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, *, scale: float, plain: bool, key_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The global key [B, H, 1, D], and the weight of each token in it [B, H, 1, N]."""
    g = token_weights(q, w_q, scale=scale, key_bias=key_bias).to(q.dtype) @ q
    p = g * k
    beta = token_weights(p, w_k, scale=scale, key_bias=key_bias)
    return beta.to(k.dtype) @ (k if plain else p), beta


@dataclasses.dataclass(frozen=True)
class FastformerOptions(options.Options):
    plain: bool = options.option(
        False, "the global key sums keys, not keys times the global query, as in the fair comparison"
    )


@register
class Fastformer(Attention):
    name = "fastformer"
    Options = FastformerOptions
    examples = ("fastformer", "fastformer:plain")

    provides = frozenset()

    def setup(self, factory: dict[str, Any]) -> None:
        if self.attn_dim != self.dim:
            raise UserError(
                f"fastformer adds its queries to its output: expected heads {self.dim} wide in all, got {self.attn_dim}"
            )
        self.w_q = nn.Parameter(torch.randn(self.num_heads, self.head_dim, **factory))
        self.w_k = nn.Parameter(torch.randn(self.num_heads, self.head_dim, **factory))

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:  # type: ignore[override]
        self.accept(x, context.grid)
        q, k, v = self.project(x)
        out, context = self.attend(q, k, v, context)
        return self.merge(out) + q.transpose(1, 2).flatten(2), context

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        return self._global_key(q, k, context)[0] * v, context

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """The weight β of each token in the global key, [B, H, queries, N].

        Tokens do not attend to each other here, so there is no map of tokens over tokens: only the global key, which
        is the same for all tokens, passes information between them. Every row is therefore the same.
        """
        q, k, _ = self.project(x)
        rows = 1 if isinstance(query, int) else len(range(*query.indices(x.shape[1])))
        return self._global_key(q, k, context)[1].expand(-1, -1, rows, -1)

    def _global_key(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        bias = context.grid.key_bias(q.dtype)
        return global_key(q, k, self.w_q, self.w_k, scale=self.scale, plain=self.options.plain, key_bias=bias)

    def core_macs(self, grid: Grid) -> int:
        return 4 * grid.tokens * self.attn_dim

    def refuses(self, grid: Grid) -> str | None:
        return None
