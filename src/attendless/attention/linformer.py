"""Linformer: keys and values are learned averages of the tokens.

    out = softmax(q (E k)ᵀ / √D) (F v)        E, F [M, N], shared by all heads

Cost is linear in the tokens, for a fixed number M of averages (`keys`). With `ratio` M grows with the grid the layer is
made for, and the cost is a fraction of full attention's. The fair comparison's numbers (30.91 M parameters, 5.496 G at
patch 4) belong to `linformer:ratio=8,shared,bias`: one projection for keys and values, with a bias per average.

E and F belong to a token grid. On another grid they are resampled: each row as an image on the 2-D grid without the
prefix columns, with its sum unchanged, because the row is an average. `forward` resamples on the fly; `resize`
replaces the weights, keeps M and writes it into the spec (`keys=M`).

In a pretrained model E and F start uniform in ±1/√N, so that an average of N tokens is about as large as a token. In a
model built to be trained from scratch they start as all linear layers in the authors' own (language) models and in the
fair comparison: normal with standard deviation 0.02, biases zero.

Shapes: B batch · H heads · N tokens · M averages · D head width · S = 1 if E = F, else 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import options
from ..sparse.backend import Choice
from ..sparse.full import attend as full
from .interface import Attention
from .registry import register
from .values import Context, Grid


def average(tokens: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
    """tokens [B, H, N, D], down [M, N], bias [M, 1] → [B, H, M, D]."""
    return down @ tokens if bias is None else down @ tokens + bias


def resample(down: Tensor, old: Grid, new: Grid) -> Tensor:
    """Projections [S, M, old tokens] → [S, M, new tokens], each row with the same sum over the patches."""
    prefix, patches = down[..., : old.prefix], down[..., old.prefix :]
    patches = patches.to(torch.promote_types(down.dtype, torch.float32))
    image = patches.unflatten(-1, (old.height, old.width))
    image = F.interpolate(image, (new.height, new.width), mode="bicubic", antialias=True)
    resampled = image.flatten(-2) * (old.patches / new.patches)
    missing = patches.sum(-1, keepdim=True) - resampled.sum(-1, keepdim=True)
    return torch.cat([prefix, (resampled + missing / new.patches).to(down.dtype)], dim=-1)


@dataclasses.dataclass(frozen=True)
class LinformerOptions(options.Options):
    keys: int = options.option(64, "number of averages", low=1)
    ratio: int = options.option(0, "instead: tokens per average, on the grid that the layer is created for", low=0)
    shared: bool = options.option(False, "one projection for keys and values")
    bias: bool = options.option(False, "add a learned bias to each average, as in the fair comparison")


@register
class Linformer(Attention):
    name = "linformer"
    Options = LinformerOptions
    rows_sum_to_one = False  # learned averages may have negative weights
    examples = ("linformer", "linformer:keys=9,shared", "linformer:ratio=8,shared,bias")

    def setup(self, factory: dict[str, Any]) -> None:
        tokens = self.grid.tokens
        averages = max(1, tokens // self.options.ratio) if self.options.ratio else self.options.keys
        sets = 1 if self.options.shared else 2
        self.down = nn.Parameter(torch.empty(sets, averages, tokens, **factory).uniform_(-1, 1) * tokens**-0.5)
        bias = nn.Parameter(torch.zeros(sets, averages, 1, **factory)) if self.options.bias else None
        self.down_bias: nn.Parameter | None
        self.register_parameter("down_bias", bias)

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.down, std=0.02)
        if self.down_bias is not None:
            nn.init.zeros_(self.down_bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        down, bias = self._down(context.grid), self.down_bias
        k = average(k, down[0], None if bias is None else bias[0])
        v = average(v, down[-1], None if bias is None else bias[-1])
        return full(q, k, v, scale=self.scale, dropout=self.dropout), context

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """softmax(q (E k)ᵀ / √D) F, [B, H, queries, N]: the weight of each token's value in each output.

        Averages are learned and may have negative weights, so a row is not a distribution.
        """
        q, k, _ = self.project(x)
        rows = slice(query, query + 1) if isinstance(query, int) else query
        down, bias = self._down(context.grid), self.down_bias
        k = average(k, down[0], None if bias is None else bias[0])
        return full(q[:, :, rows], k, down[-1].to(k.dtype).expand(*k.shape[:2], -1, -1), scale=self.scale)

    def _down(self, grid: Grid) -> Tensor:
        same = (grid.height, grid.width) == (self.grid.height, self.grid.width)
        return self.down if same else resample(self.down, self.grid, grid)

    def resize(self, grid: Grid) -> None:
        self.check(grid)
        with torch.no_grad():
            self.down = nn.Parameter(self._down(grid).detach(), requires_grad=self.down.requires_grad)
        self.options = dataclasses.replace(self.options, keys=self.down.shape[1], ratio=0)
        super().resize(grid)

    def refuses(self, grid: Grid) -> str | None:
        if grid.reduced:
            return "its averages are over whole grids, and this one lacks patches"
        if grid.prefix != self.grid.prefix:
            return f"its averages were made for {self.grid.prefix} prefix tokens"
        return None

    def core_macs(self, grid: Grid) -> int:
        """MACs of the averages of k and v, the scores and the weighted values."""
        return 4 * grid.tokens * self.down.shape[1] * self.attn_dim

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return Choice("sdpa", f"{grid.tokens} queries on {self.down.shape[1]} averages, in PyTorch's fused kernel")
