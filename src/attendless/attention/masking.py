"""Attention weights while training masks patches rather than removing them, so that each image keeps its own number.

    E_ij = exp(A_ij − max_j A_ij) · P_ij        P_ij = 1 if i = j, otherwise p_j: 1, or 0 for a masked patch
    weights_ij = (E_ij + ε / N) / (Σ_j E_ij + ε)

A masked token still attends to itself, so that it has a gradient. DynamicViT's authors compute weights in this way.

Shapes: B batch · H heads · N tokens · scores A [B, H, N, N] · present p [B, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-6


def masked_weights(scores: Tensor, present: Tensor) -> Tensor:
    """The weights for `scores`, computed in fp32 or more precisely, of the type of `scores`."""
    precise = torch.promote_types(scores.dtype, torch.float32)
    keys = present.to(precise)[:, None, None]
    keys = keys + (1 - keys) * torch.eye(scores.shape[-1], dtype=precise, device=scores.device)
    found = (scores - scores.amax(-1, keepdim=True)).to(precise).exp() * keys
    return ((found + _EPS / scores.shape[-1]) / (found.sum(-1, keepdim=True) + _EPS)).to(scores.dtype)
