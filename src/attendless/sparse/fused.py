"""PyTorch's fused attention, replaced by plain products where its backward pass is slow.

On a CPU in half precision, the backward pass of the fused kernel takes up to five times as long as that of plain
products that store the attention weights (docs/results/training.md). Plain products are used there, up to a limit of
memory for the weights.

Shapes: q [·, N, D] · k, v [·, M, ·] · mask [·, N, M], added to the scores, or bool: True where a query sees a key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: The most attention weights that one call stores: 64 MB.
_STORED = 1 << 25


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v"""
    if dropout or not slow_backward(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (scale * q) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ v


def slow_backward(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this call has a gradient that the fused kernel computes slowly."""
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    half = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    return trains and half and q.shape[:-1].numel() * k.shape[-2] <= _STORED
