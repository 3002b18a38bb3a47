"""LaViT's diagonality-preserving loss: a transformed map should stay one in which tokens attend to themselves.

    printed    Σ_ij |A_ij - A_ji|  +  Σ_i ((N - 1) A_ii - Σ_{j≠i} A_ij)

Minimised as printed, it makes the diagonal small, against what its authors say it is for; `corrected` turns the sign of
the second sum. On scores either is unbounded below, so there the corrected one is hinged: once a token's own score is 1
above its mean of the others it costs nothing. On weights after the softmax all is bounded. Summed over N² pairs the
loss would dwarf every other, so it is their mean.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Sign = Literal["corrected", "poster"]
On = Literal["softmax", "scores"]


def diagonality(scores: Tensor, sign: Sign = "corrected", on: On = "softmax") -> Tensor:
    """The loss of scores [..., N, N], averaged over maps and pairs of tokens."""
    a = torch.softmax(scores, dim=-1) if on == "softmax" else scores
    N = a.shape[-1]
    pairs = max(1, N * (N - 1))
    symmetry = (a - a.mT).abs().sum((-2, -1)) / pairs
    own = a.diagonal(dim1=-2, dim2=-1)
    above = own - (a.sum(-1) - own) / max(1, N - 1)  # how far each token's own stands above the mean of the others
    if sign == "poster":
        return (symmetry + above.mean(-1)).mean()
    below = -above if on == "softmax" else (1 - above).clamp(min=0)
    return (symmetry + below.mean(-1)).mean()
