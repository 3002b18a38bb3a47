"""Attention over unstructured keys: every query of every head has a list of its own.

    out_i = Σ_j p_ij v_j        p_i = softmax of scale · q_i·k_j + b_j over the first counts[i] keys j of indices[i]

A list may be in any order; a key that stands in it twice counts twice; a query with no keys gets zeros. Sparsifiner's
masks and any other choice of keys made query by query come in this form. This is the definition in PyTorch.

Shapes: B batch · H heads · N tokens · m keys in a list at most · q, k [B, H, N, D] · v [B, H, N, E] · indices
int32 [B, H, N, m] · counts int32 [B, H, N], or None if every list is full · key_bias b [B, N] · lse [B, H, N].
"""

from __future__ import annotations

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
) -> Tensor:
    """The definition in PyTorch, differentiable. It copies every listed key, so it needs [B, H, N, m, D] of memory."""
    B, H, N, m = indices.shape
    at = torch.arange(m, device=q.device)
    real = at < (torch.full((B, H, N, 1), m, device=q.device) if counts is None else counts[..., None])
    index = indices.long().where(real, 0)  # what lies beyond the count may be anything

    def take(x_BHNE: Tensor) -> Tensor:
        return x_BHNE.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, x_BHNE.shape[-1])).unflatten(2, (N, m))

    score = scale * (q[:, :, :, None] * take(k)).sum(-1)
    if key_bias is not None:
        score = score + key_bias[:, None, None].expand(-1, H, N, -1).gather(3, index).to(score.dtype)
    score = score.masked_fill(~real, -torch.inf)
    seen = (score != -torch.inf).any(-1, keepdim=True)
    weight = torch.softmax(score.where(seen, 0), dim=-1).where(seen & real, 0)
    return (weight[..., None] * take(v)).sum(3)
