"""Weights of one attention for another: the rows of `qkv` that it projects."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .interface import Attention


def fitted(attention: Attention, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` of another attention with only those rows of `qkv`, the last ones, that `attention` projects."""
    rows = attention.projected * attention.attn_dim
    return {name: w[-rows:] if name.startswith("qkv.") and len(w) > rows else w for name, w in weights.items()}
