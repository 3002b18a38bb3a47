"""Attention over keys selected for each query of each head: the selection, and attention over the selected keys.

    largest     the `budget` keys with the highest scores
    learnable   the same selection with a gradient, so that the predictor of the scores can be trained
    attend      softmax over the chosen keys; other keys are dropped, or represented by averages (`basis.Rest`):

        out_i = softmax over { scale · q_i·k_j + b_j : j chosen } ∪ { scale · q_i·k̄_r + log m_ir : r an average }

with m_ir the number of tokens that average r represents for query i. With `Rest`, the weights of a query cover all
tokens: keys that were not chosen are blurred, not lost.

This file is the differentiable PyTorch definition; it masks N × N products. `gather` and the native kernels compute the
same function from lists of keys.

Shapes: B batch · H heads · N tokens · q, k, v [B, H, N, ·] · scores, chosen [B, H, N, N] · key_bias b [B, N].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .basis import Rest

#: Width of the sigmoid that replaces the selection in the backward pass, in units of log score.
_EDGE = 0.1


def sparse(coefficients: Tensor, *, tau: float, top: int) -> Tensor:
    """Set small coefficients to zero: those up to `tau`, or, with `top`, all but the `top` largest."""
    if top:
        least = coefficients.topk(min(top, coefficients.shape[-1]), dim=-1).values[..., -1:]
        return coefficients.where(coefficients >= least, 0)
    return coefficients.where(coefficients > tau, 0)


def largest(scores: Tensor, budget: int, *, prefix: int = 0, above: float = -torch.inf) -> Tensor:
    """The keys with the `budget` highest scores of each row, if the scores are above `above`. Prefix queries take all
    keys. On equal scores, the lower index wins.
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
    """The selection as zeros and ones, with a straight-through gradient for the positive scores it was made from.

    The selection is a step function. The backward pass replaces it by a sigmoid of log score around the last chosen
    key. The number of chosen keys is fixed, so what one key gains, the others near the threshold lose:

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
    """Attend to the chosen keys, and to the averages of `rest` if given. A query without keys gets zeros.

    `chosen` is a selection, or the result of `learnable`. It multiplies e^score, so that keys that were not chosen get
    a gradient too.
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
    # Scores of keys that were not chosen may be far above `top`: their weight is 0 · e^score, so clamp e^score.
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
    """Softmax over all keys, then drop the keys that were not chosen: rows do not sum to one."""
    score = scale * q @ k.transpose(-2, -1)
    score = score if key_bias is None else score + key_bias[:, None, None].to(score.dtype)
    weight = torch.softmax(score, dim=-1) * chosen
    return torch.dropout(weight, dropout, dropout > 0) @ v


def unlisted(indices: Tensor, counts: Tensor, keys: int, prefix: int = 0) -> Tensor:
    """Lists of keys, as for `gather.attend`, as a selection: bool [B, H, N, keys]. Prefix queries take all keys."""
    real = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    chosen = torch.zeros(*counts.shape, keys + 1, dtype=torch.bool, device=indices.device)
    chosen.scatter_(
        -1, indices.long().where(real, keys), True
    )  # entries beyond the count go to a column that is dropped
    if prefix:
        chosen[:, :, :prefix] = True
    return chosen[..., :keys]
