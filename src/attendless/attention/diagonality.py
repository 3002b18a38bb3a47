"""LaViT's diagonality-preserving loss: in a transformed map tokens should still attend to themselves.

    printed    Σ_ij |A_ij - A_ji|  +  Σ_i ((N - 1) A_ii - Σ_{j≠i} A_ij)

Minimising the printed loss makes the diagonal small, contrary to its stated purpose; `corrected` changes the sign of
the second sum. On scores both forms are unbounded below, so there the corrected one is hinged: a token whose own score
is 1 above the mean of the others costs nothing. On weights after the softmax the loss is bounded. The loss is the mean
over the N² pairs, because their sum would dominate all other losses.
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
    above = own - (a.sum(-1) - own) / max(1, N - 1)  # each token's own score minus the mean of the others
    if sign == "poster":
        return (symmetry + above.mean(-1)).mean()
    below = -above if on == "softmax" else (1 - above).clamp(min=0)
    return (symmetry + below.mean(-1)).mean()
