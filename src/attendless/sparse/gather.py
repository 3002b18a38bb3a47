"""Attention over unstructured keys: every query of every head has its own list of keys.

    out_i = Σ_j p_ij v_j        p_i = softmax of scale · q_i·k_j + b_j over the first counts[i] keys j of indices[i]

A list may be in any order. A key that occurs twice counts twice. A query without keys gets zeros. Sparsifiner's masks,
and any other selection of keys per query, have this form. This file is the PyTorch definition.

There are as many queries as keys: both are the tokens of one layer.

Shapes: B batch · H heads · N tokens · m keys in a list at most · q, k [B, H, N, D] · v [B, H, N, E] · indices
int32 [B, H, N, m] · counts int32 [B, H, N], or None if every list is full · key_bias b [B, N] · lse [B, H, N].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    softmax: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The differentiable definition. It copies every listed key, so it allocates [B, H, N, m, D].

    `softmax` is over the last axis, PyTorch's unless another is given, as by `bf16`.
    """
    B, H, N, m = indices.shape
    at = torch.arange(m, device=q.device)
    real = at < (torch.full((B, H, N, 1), m, device=q.device) if counts is None else counts[..., None])
    index = indices.long().where(real, 0)  # entries beyond the count are undefined

    def take(x_BHNE: Tensor) -> Tensor:
        return x_BHNE.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, x_BHNE.shape[-1])).unflatten(2, (N, m))

    # Products of matrices, not sums of element-wise products: PyTorch's FLOP counter sees only the former.
    score = scale * (q[:, :, :, None] @ take(k).mT).squeeze(3)
    if key_bias is not None:
        score = score + key_bias[:, None, None].expand(-1, H, N, -1).gather(3, index).to(score.dtype)
    score = score.masked_fill(~real, -torch.inf)
    seen = (score != -torch.inf).any(-1, keepdim=True)
    masked = score.where(seen, 0)
    weight = (softmax(masked) if softmax else torch.softmax(masked, dim=-1)).where(seen & real, 0)
    return (weight[:, :, :, None] @ take(v)).squeeze(3)
