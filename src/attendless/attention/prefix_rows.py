"""The outputs of the prefix tokens alone.

Where every prefix query attends to all keys, its output is a row of full attention. Patches then need keys and values,
but no queries and no outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from ..sparse.full import attend as full
from .values import Grid, Macs


class PrefixRows(nn.Module):
    """The part of `Attention` that computes prefix rows; `Attention` defines what is declared here."""

    dim: int
    num_heads: int
    head_dim: int
    attn_dim: int
    scale: Any
    provides: ClassVar[frozenset[str]]
    attn_drop: nn.Dropout
    qkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    proj: nn.Module
    if TYPE_CHECKING:

        @classmethod
        def has_core(cls) -> bool: ...

        def merge(self, out: Tensor) -> Tensor: ...

    @property
    def prefix_is_full(self) -> bool:
        """Whether prefix queries attend to all keys exactly as in full attention."""
        return "class_attention" in self.provides and self.has_core()

    def attend_prefix(self, x: Tensor, grid: Grid) -> Tensor:
        """x [B, N, C] → the layer's output for the prefix tokens, [B, P, C]. Requires `prefix_is_full`."""
        queries, keys_and_values = self.project_prefix(x, grid.prefix)
        tokens = (queries, *keys_and_values.chunk(2, dim=-1))
        q, k, v = (t.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for t in tokens)
        drop, bias = self.attn_drop.p if self.training else 0.0, grid.key_bias(q.dtype)
        return self.merge(full(self.q_norm(q), self.k_norm(k), v, scale=self.scale, key_bias=bias, dropout=drop))

    def project_prefix(self, x: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
        """x [B, N, C] → the queries of its first `prefix` tokens; the keys and values of all tokens, concatenated."""
        weight, bias, width = self.qkv.weight, self.qkv.bias, self.attn_dim
        biases = (None, None) if bias is None else (bias[:width], bias[width:])
        return F.linear(x[:, :prefix], weight[:width], biases[0]), F.linear(x, weight[width:], biases[1])

    def prefix_macs(self, grid: Grid) -> Macs:
        """Multiply-accumulates of `attend_prefix` for one image."""
        P, N = grid.prefix, grid.tokens
        output = 0 if isinstance(self.proj, nn.Identity) else P * self.attn_dim * self.dim
        return Macs(2 * P * N * self.attn_dim, (P + 2 * N) * self.dim * self.attn_dim + output)
