"""Attention in which every query of every head has chosen keys of its own: the choice, and what is done with it.

    largest     the `budget` keys with the highest scores
    learnable   the same choice with a gradient, so that what made the scores can learn to choose
    attend      softmax over the chosen keys; those not chosen are dropped, or stand behind averages (`basis.Rest`):

        out_i = softmax over { scale · q_i·k_j + b_j : j chosen } ∪ { scale · q_i·k̄_r + log m_ir : r an average }

with m_ir the tokens average r still stands for. `Rest` keeps every query's weights summing over all tokens, so nothing
that was not chosen is lost, only blurred.

This file is the definition in PyTorch, differentiable; it masks dense products. `gather` and the native kernels compute
the same from lists.

Shapes: B batch · H heads · N tokens · q, k, v [B, H, N, ·] · scores, chosen [B, H, N, N] · key_bias b [B, N].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .basis import Rest

#: In logarithms of scores: how near to the last key that was chosen another must be to be thought of.
_EDGE = 0.1


def sparse(coefficients: Tensor, *, tau: float, top: int) -> Tensor:
    """Coefficients with the small ones set to zero: those up to `tau`; or, with `top`, all but so many largest."""
    if top:
        least = coefficients.topk(min(top, coefficients.shape[-1]), dim=-1).values[..., -1:]
        return coefficients.where(coefficients >= least, 0)
    return coefficients.where(coefficients > tau, 0)


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


def learnable(chosen: Tensor, scores: Tensor, *, prefix: int = 0) -> Tensor:
    """The choice as zeros and ones, with a gradient for the scores it was made by, all of them positive.

    A choice is a step and has none. Backwards it is taken for a slope, a sigmoid of log score around the last key that
    was chosen; and because as many are chosen as before, what a key gains there the others near the edge lose:

        d/d log s_j = w_j (g_j − Σ w g / Σ w),   w = the slope's derivative at j,   g = the choice's gradient
    """
    found: Tensor = _StraightThrough.apply(chosen, (scores + 1e-5).log(), prefix)
    return found


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chosen: Tensor, score: Tensor, prefix: int) -> Tensor:
        edge = score.masked_fill(~chosen, torch.inf).amin(-1, keepdim=True)
        ctx.save_for_backward(score, edge)
        ctx.prefix = prefix
        return chosen.to(score.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        score, edge = ctx.saved_tensors
        chance = torch.sigmoid((score - edge) / _EDGE)
        slope = chance * (1 - chance) / _EDGE
        mean = (slope * gradient).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp(min=1e-12)
        slope[:, :, : ctx.prefix] = 0
        return None, slope * (gradient - mean), None


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
    """Attend to the chosen keys, and to the rest if there is one; a query with nothing to look at gets zeros.

    `chosen` is a choice, or one that is `learnable`: it multiplies e^score, so that a key that was not chosen can tell
    by its gradient whether it should have been.
    """
    score = scale * q @ k.transpose(-2, -1)
    score = score if key_bias is None else score + key_bias[:, None, None].to(score.dtype)
    mass = chosen.to(score.dtype)
    if rest is not None:
        left = rest.mass(chosen)
        left = torch.cat([torch.zeros_like(left[:, :, :prefix]), left[:, :, prefix:]], dim=2)
        score = torch.cat([score, scale * q @ (rest.average @ k).transpose(-2, -1)], dim=-1)
        mass, v = torch.cat([mass, left.to(score.dtype)], dim=-1), torch.cat([v, rest.average @ v], dim=2)
    top = score.detach().masked_fill(mass == 0, -torch.inf).amax(-1, keepdim=True)
    # What was not chosen may lie far above: its weight is zero whatever e^score is, as long as that is finite.
    weight = mass * (score - top.where(top != -torch.inf, 0)).clamp(max=10).exp()
    total = weight.sum(-1, keepdim=True)
    return torch.dropout(weight / total.where(total > 0, 1), dropout, dropout > 0) @ v


def attend_after_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The softmax over all keys first, then what was not chosen is dropped: rows do not sum to one."""
    score = scale * q @ k.transpose(-2, -1)
    score = score if key_bias is None else score + key_bias[:, None, None].to(score.dtype)
    weight = torch.softmax(score, dim=-1) * chosen
    return torch.dropout(weight, dropout, dropout > 0) @ v


def unlisted(indices: Tensor, counts: Tensor, keys: int, prefix: int = 0) -> Tensor:
    """Lists of keys, as `gather_attend` takes them, as a choice: bool [B, H, N, keys]; prefix queries take all."""
    real = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    chosen = torch.zeros(*counts.shape, keys + 1, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices.long().where(real, keys), True)  # what does not count goes where nobody looks
    if prefix:
        chosen[:, :, :prefix] = True
    return chosen[..., :keys]
