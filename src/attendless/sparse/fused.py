"""PyTorch's fused attention, and products in its place where it is slow to learn from.

On a CPU the fused kernel's way back in half precision takes up to five times as long as products whose weights are kept
(docs/results/training.md). There the weights are kept, as long as they are not too many.

Shapes: q [·, N, D] · k, v [·, M, ·] · mask [·, N, M], added to the scores, or bool: which of them count.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: As many weights of one call are kept: 64 MB of them.
_KEPT = 1 << 25


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v"""
    if dropout or not slow_to_learn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (scale * q) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ v


def slow_to_learn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    half = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    return learns and half and q.shape[:-1].numel() * k.shape[-2] <= _KEPT
