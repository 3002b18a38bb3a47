"""Attention in bfloat16 and in int8, as the compiled kernels round it: the definition they are tested against.

q, k and v in bf16 ask for it. Every factor of a product is a bf16 number, every sum and the softmax are fp32:

    s = scale · q kᵀ + b                      of bf16 q and k; b in fp32
    w = bf16(2^(s / ln 2 − c))                c: the nearest integer to the row's maximum
    out = bf16(w v / Σ w)                     of bf16 v; the rounded weights are summed

Rounding keeps 8 significant bits, so it is the same for every integer c: kernels may use the maximum of the keys they
have seen so far. Means of keys and values (`foveal.levels`, `basis.Rest`) are computed in fp32 and rounded once; keys
and cells are chosen in fp32. For the matrix H of foveal attention's first order, differences from the unrounded means
are rounded, multiplied and summed in fp32, and H is rounded; q H is multiplied by the mass and the scale in fp32.

A backend of PyTorch's own (`fused.attend`) rounds in other places, by as much.

`foveal:int8` (`Layout.int8`) computes the scores of patches and means from int8 numbers, whatever the type of q:

    s = scale · a b · Q Kᵀ + bias             int8 Q = q / a and K = (k − m) / b; a = max |q| / 127 and b of each row

m is the mean of at most 64 keys. It adds the same number to every score of a query, which a softmax does not notice.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import foveal, gather


def rounded(x: Tensor) -> Tensor:
    """The nearest bf16 numbers, in fp32."""
    return x.bfloat16().float()


def weigh(scores: Tensor) -> Tensor:
    """softmax(scores) of fp32 scores [·, N, M], its weights rounded before they are summed; a row of −∞ gives zeros."""
    if not scores.shape[-1]:
        return scores
    scores = scores / math.log(2)
    most = scores.amax(-1, keepdim=True).round()
    weights = rounded(torch.exp2(scores - most.where(most.isfinite(), 0)))
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total != 0, 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v in fp32, of rounded factors; arguments as for `fused.attend`, without dropout."""
    scores = scale * (rounded(q) @ rounded(k).mT)
    return weigh(scores if mask is None else scores + mask.float()) @ rounded(v)


def _bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [·, N, D] as whole numbers from −127 to 127 and a scale for each row [·, N, 1]."""
    most = x.abs().amax(-1, keepdim=True)
    return torch.round(x * (127 / most.where(most > 0, torch.inf))), most / 127


def centre(k: Tensor) -> Tensor:
    """The vector that int8 keys are relative to: the mean of every n-th of the keys [B, H, N, D], at most 64."""
    return k[:, :, :: -(-k.shape[2] // 64)].float().mean(2, keepdim=True)


def attend_int8(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, middle: Tensor, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """As `attend`, with scores of int8 numbers; `middle` [B, H, 1, D] is subtracted from the keys."""
    (q, by), (k, times) = _bytes(rounded(q)), _bytes(rounded(k) - middle)
    scores = (q @ k.mT) * times.mT * (scale * by)
    return weigh(scores if mask is None else scores + mask.float()) @ rounded(v)


def full(q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_bias: Tensor | None = None) -> Tensor:
    """Full attention: q [B, H, N, D], k, v [B, H, M, ·], key_bias [B, M]."""
    mask = None if key_bias is None else key_bias[:, None, None, :]
    return attend(q, k, v, mask, scale=scale).to(q.dtype)


def foveal_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    layout: foveal.Layout,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Foveal attention to the chosen cells, as `foveal.attend`."""
    wide = (rounded(q), rounded(k), rounded(v))
    attention = functools.partial(attend_int8, middle=centre(k)) if layout.int8 else attend
    out = foveal.attend(
        *wide, chosen, layout, scale=scale, key_bias=key_bias, places=places, attention=attention, rounding=rounded
    )
    return out.to(q.dtype)


def gather_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    scale: float,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attention to the listed keys, as `gather.attend`."""
    wide = (rounded(q), rounded(k), rounded(v))
    return gather.attend(*wide, indices, counts, scale=scale, key_bias=key_bias, softmax=weigh).to(q.dtype)
