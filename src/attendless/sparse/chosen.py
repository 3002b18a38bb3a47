"""Attention in which every query of every head has chosen keys of its own: the choice, and what is done with it.

    largest   the `budget` keys with the highest scores
    attend    softmax over the chosen keys; those not chosen are dropped, or stand behind averages (`basis.Rest`):

        out_i = softmax over { scale · q_i·k_j + b_j : j chosen } ∪ { scale · q_i·k̄_r + log m_ir : r an average }

with m_ir the tokens average r still stands for. `Rest` keeps every query's weights summing over all tokens, so nothing
that was not chosen is lost, only blurred.

This file is the definition in PyTorch, differentiable; it masks dense products. `gather` and the native kernels compute
the same from lists.

Shapes: B batch · H heads · N tokens · q, k, v [B, H, N, ·] · scores, chosen [B, H, N, N] · key_bias b [B, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .basis import Rest


def largest(scores: Tensor, budget: int, *, prefix: int = 0, above: float = -torch.inf) -> Tensor:
    """The keys with the `budget` highest scores of each row, if they are `above` a bound; prefix queries take all.

    Of equal scores the one of the lower index is taken.
    """
    least = scores.topk(min(budget, scores.shape[-1]), dim=-1).values[..., -1:]
    chosen, level = scores > least, scores == least
    room = budget - chosen.sum(-1, keepdim=True)
    chosen |= level & (level.cumsum(-1) <= room)
    chosen &= scores > above
    if prefix:
        chosen[:, :, :prefix] = True
    return chosen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    rest: Rest | None = None,
    prefix: int = 0,
    dropout: float = 0.0,
) -> Tensor:
    """Attend to the chosen keys, and to the rest if there is one; a query with nothing to look at gets zeros."""
    score = scale * q @ k.transpose(-2, -1)
    score = score if key_bias is None else score + key_bias[:, None, None].to(score.dtype)
    score = score.masked_fill(~chosen, -torch.inf)
    if rest is not None:
        mass = rest.mass(chosen).to(score.dtype)
        mass = torch.cat([torch.zeros_like(mass[:, :, :prefix]), mass[:, :, prefix:]], dim=2)
        blurred = scale * q @ (rest.average @ k).transpose(-2, -1)
        score = torch.cat([score, (blurred + mass.log()).masked_fill(mass == 0, -torch.inf)], dim=-1)
        v = torch.cat([v, rest.average @ v], dim=2)
    seen = (score != -torch.inf).any(-1, keepdim=True)
    weight = torch.softmax(score.where(seen, 0), dim=-1).where(seen, 0)
    return torch.dropout(weight, dropout, dropout > 0) @ v


def unlisted(indices: Tensor, counts: Tensor, keys: int, prefix: int = 0) -> Tensor:
    """Lists of keys, as `gather_attend` takes them, as a choice: bool [B, H, N, keys]; prefix queries take all."""
    real = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    chosen = torch.zeros(*counts.shape, keys + 1, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices.long().where(real, keys), True)  # what does not count goes where nobody looks
    if prefix:
        chosen[:, :, :prefix] = True
    return chosen[..., :keys]
