"""Performer attention (FAVOR+): softmax attention with its exponential kernel replaced by random positive features.

    exp(q·k / √D) = E_w[φ_w(q) φ_w(k)]        φ_w(x) = exp(w·x' - |x'|² / 2),  x' = x / D^¼,  w ~ N(0, I)
    out = φ(q) (φ(k)ᵀ v) / φ(q) (φ(k)ᵀ 1)

With r features drawn once, cost is linear in the tokens, and the output converges to full attention's as r grows. The
features of a head are orthogonal in groups of D, with the lengths of independent Gaussian vectors, so that the estimate
is unbiased and has a lower variance. They are drawn from `seed`, frozen, and stored in the state dict.

Default is the paper's r = D ln D. The fair comparison's numbers (4.481 G at patch 4) belong to `performer:features=16`
at head width 32; its code scales the rows to √r instead.

Stabilised without an epsilon: for each feature the largest log φ(k) is moved from the keys to the queries, then the
largest log φ(q) of each query is subtracted. Both cancel in the quotient, whose denominator is then at least one. The
computation is in fp32, or in fp64 for fp64 inputs. There are no token-to-token weights, so attention dropout has no
effect.

Prefix tokens are treated like patches. A token that represents s tokens counts s times.
Shapes: B batch · H heads · N tokens · D head width · R features.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .. import options
from .interface import Attention
from .registry import register
from .values import Context, Grid


def orthogonal_features(heads: int, count: int, width: int, seed: int) -> Tensor:
    """Gaussian vectors [H, R, D], orthogonal to each other in groups of D."""
    draws = torch.Generator().manual_seed(seed)
    groups = math.ceil(count / width)
    square = torch.randn(heads, groups, width, width, generator=draws, dtype=torch.float64)
    q, r = torch.linalg.qr(square)
    # Undo the sign convention of the QR decomposition, so that every direction is equally likely.
    directions = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).flatten(1, 2)[:, :count]
    lengths = torch.randn(heads, count, width, generator=draws, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return (directions * lengths).float()


def performer(
    q: Tensor, k: Tensor, v: Tensor, features: Tensor, *, scale: float, key_bias: Tensor | None = None
) -> Tensor:
    """q, k [B, H, N, D], v [B, H, N, ·], features [H, R, D], key_bias [B, N] → [B, H, N, ·]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k, features = (t.to(dtype) for t in (scale**0.5 * q, scale**0.5 * k, features))
        # The |q|² / 2 of a query cancels between numerator and denominator.
        log_q = q @ features.transpose(-2, -1)
        log_k = k @ features.transpose(-2, -1) - k.square().sum(-1, keepdim=True) / 2
        if key_bias is not None:
            log_k = log_k + key_bias[:, None, :, None]
        # The maxima cancel in the quotient, so they need no gradient.
        top_k = log_k.detach().amax(dim=-2, keepdim=True)
        log_q = log_q + top_k
        phi_k = torch.exp(log_k - top_k)
        phi_q = torch.exp(log_q - log_q.detach().amax(dim=-1, keepdim=True))
        sums, total = phi_k.transpose(-2, -1) @ v.to(dtype), phi_k.sum(dim=-2).unsqueeze(-1)
        return ((phi_q @ sums) / (phi_q @ total)).to(v.dtype)


@dataclasses.dataclass(frozen=True)
class PerformerOptions(options.Options):
    features: int = options.option(0, "random features per head; 0: D ln D for head width D", low=0)
    seed: int = options.option(0, "seed of the features", low=0)


@register
class Performer(Attention):
    name = "performer"
    Options = PerformerOptions
    examples = ("performer", "performer:features=16", "performer:features=100,seed=1")

    def setup(self, factory: dict[str, Any]) -> None:
        count = self.options.features or max(1, int(self.head_dim * math.log(self.head_dim)))
        drawn = orthogonal_features(self.num_heads, count, self.head_dim, self.options.seed)
        self.features: Tensor
        self.register_buffer("features", drawn.to(**factory))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        bias = context.grid.key_bias(torch.promote_types(q.dtype, torch.float32))
        return performer(q, k, v, self.features, scale=self.scale, key_bias=bias), context

    def core_macs(self, grid: Grid) -> int:
        """MACs of the features of q and k, the sums and weighted sums of v, and the denominator."""
        return self.num_heads * grid.tokens * self.features.shape[1] * (4 * self.head_dim + 1)

    def refuses(self, grid: Grid) -> str | None:
        return None
