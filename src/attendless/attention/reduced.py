"""Spatial-reduction attention (PVT): every token attends to a smaller copy of the grid.

    z = LN(conv(x))                 stride and kernel = ratio: one key for every ratio × ratio patches
    out = softmax(q(x) k(z)ᵀ / √D) v(z)

`pool=7` is PVT v2's linear form, whose cost does not depend on how many patches the keys stand for:

    z = GELU(LN(conv1×1(pool(x))))  the grid averaged down to 7 × 7

Both project keys and values after the reduction, with the rows of `qkv` that full attention would use; `ratio=1`
without a pool reduces nothing and is full attention. PVT uses ratio 8, 4, 2, 1 in its four stages; Twins' global layers
are this too, between layers of `window:bias=false`.

In a pretrained model the convolution starts as the mean of its patches. In a model built to be trained from scratch it
has PyTorch's default initialisation, as in PVT; backbones in the style of PVT v2 and Twins then apply their own.

As in PVT, patches beyond the last whole block are no keys; a side shorter than the ratio is padded with zeros to one
block. Prefix tokens are keys of their own, unreduced.

timm's PVT v2 stores q and kv apart (stacked they are `qkv`) and calls `sr_norm` `norm`.

Shapes: B batch · H heads · N tokens · M keys · D head width · C model width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import options
from ..sparse.backend import Choice
from ..sparse.full import attend as full
from .registry import register
from .scores import OwnScoreShape
from .values import Context, Grid


@dataclasses.dataclass(frozen=True)
class ReducedOptions(options.Options):
    ratio: int = options.option(2, "patches along a side that form one key, by a convolution", low=1)
    pool: int = options.option(0, "instead: average the grid to this many keys per side (PVT v2 linear: 7)", low=0)


@register
class Reduced(OwnScoreShape):
    name = "reduced"
    Options = ReducedOptions
    examples: ClassVar[tuple[str, ...]] = ("reduced", "reduced:ratio=3", "reduced:ratio=1", "reduced:pool=3")

    def setup(self, factory: dict[str, Any]) -> None:
        ratio, pool = self.options.ratio, self.options.pool
        if pool or ratio > 1:
            block = 1 if pool else ratio
            self.sr = nn.Conv2d(self.dim, self.dim, block, stride=block, **factory)
            self.sr_norm = nn.LayerNorm(self.dim, **factory)
            with torch.no_grad():
                self.sr.weight.copy_(torch.eye(self.dim)[:, :, None, None] / block**2)
                self.sr.bias.zero_()  # type: ignore[union-attr]

    provides = frozenset({"scores"})  # its keys are not those of single tokens
    takes = frozenset({"residual"})

    def init_weights(self) -> None:
        if hasattr(self, "sr"):
            self.sr.reset_parameters()

    def keys(self, grid: Grid) -> int:
        """The number of keys: prefix tokens, and one for every block of patches."""
        if self.options.pool:
            return grid.prefix + self.options.pool**2
        down, across = (max(1, side // self.options.ratio) for side in (grid.height, grid.width))
        return grid.prefix + down * across

    def reduce(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens [B, N, C] → the reduced tokens from which keys and values are projected, [B, M, C]."""
        if not hasattr(self, "sr"):
            return x
        image = x[:, grid.prefix :].transpose(1, 2).unflatten(2, (grid.height, grid.width))
        z = self.sr_norm(self.sr(self._shrink(image)).flatten(2).transpose(1, 2))
        return torch.cat([x[:, : grid.prefix], F.gelu(z) if self.options.pool else z], dim=1)

    def _shrink(self, image: Tensor) -> Tensor:
        """The input of the convolution: the pooled grid, or the grid padded to at least one block per side."""
        if self.options.pool:
            return F.adaptive_avg_pool2d(image, self.options.pool)
        height, width = image.shape[-2:]
        return F.pad(image, (0, max(0, self.options.ratio - width), 0, max(0, self.options.ratio - height)))

    def project_reduced(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, C] → q [B, H, N, D] and k, v [B, H, M, D]."""
        A = self.attn_dim
        weight, bias = self.qkv.weight, self.qkv.bias
        q = F.linear(x, weight[:A], None if bias is None else bias[:A])
        kv = F.linear(self.reduce(x, grid), weight[A:], None if bias is None else bias[A:])
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, *kv.split(A, dim=2)))
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:  # type: ignore[override]
        self.accept(x, context.grid)
        out, context = self.attend(*self.project_reduced(x, context.grid), context)
        return self.merge(out), context

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        if "scores" not in context.wants and context.residual is None:
            return full(q, k, v, scale=self.scale, dropout=self.dropout), context
        scores = self.scale * q @ k.transpose(-2, -1)
        scores = scores if context.residual is None else scores + context.residual
        weights = torch.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
        return weights @ v, context.replace(scores=scores)

    def score_shape(self, batch: int, grid: Grid) -> tuple[int, ...]:
        return (batch, self.num_heads, grid.tokens, self.keys(grid))

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """The weight of each key, spread evenly over the patches of the key, [B, H, queries, N]."""
        q, k, _ = self.project_reduced(x, context.grid)
        rows = slice(query, query + 1) if isinstance(query, int) else query
        spread = self.spread(context.grid).to(q).expand(*q.shape[:2], -1, -1)
        if context.residual is not None:
            context = context.replace(residual=context.residual[:, :, rows])
        return self.attend(q[:, :, rows], k, spread, context)[0]

    def spread(self, grid: Grid) -> Tensor:
        """The share of each token in each key, [M, N]; rows sum to one."""
        if not hasattr(self, "sr"):
            return torch.eye(grid.tokens)
        # The mean over a block is the mean over its rows of the means over its columns.
        patches = torch.kron(self._shares(grid.height), self._shares(grid.width))
        return torch.block_diag(torch.eye(grid.prefix), patches)

    def _shares(self, side: int) -> Tensor:
        """The share of each position along a side in each block of that side."""
        places = torch.eye(side)[:, None]
        if self.options.pool:
            shares = F.adaptive_avg_pool1d(places, self.options.pool)[:, 0].T
        else:
            whole = F.pad(places, (0, max(0, self.options.ratio - side)))
            shares = F.avg_pool1d(whole, self.options.ratio)[:, 0].T
        return (shares / shares.sum(1, keepdim=True)).contiguous()  # `torch.kron` takes no transposed tensors

    def core_macs(self, grid: Grid) -> int:
        return 2 * grid.tokens * self.keys(grid) * self.attn_dim

    def projection_macs(self, grid: Grid) -> int:
        return (2 * grid.tokens + 2 * self.keys(grid)) * self.dim * self.attn_dim

    def extra_macs(self, grid: Grid) -> int:
        return (self.keys(grid) - grid.prefix) * self.sr.weight.numel() if hasattr(self, "sr") else 0

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return Choice("sdpa", f"{grid.tokens} queries on {self.keys(grid)} keys, in PyTorch's fused kernel")
