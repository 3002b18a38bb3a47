"""Full attention: every query attends to every key. The baseline of all comparisons.

    out = softmax(scale · q kᵀ + b) v

Shapes: B batch · H heads · N queries · M keys · q [B, H, N, D] · k, v [B, H, M, ·] · key_bias b [B, M].
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from . import fused


@dataclasses.dataclass(frozen=True)
class Whole:
    """The plan of a call: the number of tokens."""

    tokens: int


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_bias: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    mask = None if key_bias is None else key_bias[:, None, None, :].to(q.dtype)
    return fused.attend(q, k, v, mask, scale=scale, dropout=dropout)


def macs(tokens: int, dim: int) -> int:
    """Multiply-accumulates of q·kᵀ and weights·v, for one image with `dim` channels over all heads."""
    return 2 * tokens**2 * dim
