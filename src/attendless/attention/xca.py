"""Cross-covariance attention (XCiT): channels attend to channels by their covariance over the tokens.

    out_n = softmax(τ q̂ᵀ k̂) v_n        q̂, k̂: each channel divided by its L2 norm over the tokens; τ learned, per head

The D × D matrix is the same for every token, so cost is linear in the tokens. `plain` omits norm and temperature and
divides by √N instead:

    out_n = softmax(qᵀ k / √N) v_n

This is what the code of the fair comparison runs: its numbers for XCA (28.27 M parameters, 4.480 G at patch 4) belong
to `xca:plain`, XCiT's own numbers to `xca`.

`lpi` adds XCiT's local patch interaction, x + conv(BN(GELU(conv(LN x)))) with depthwise 3 × 3 convolutions, after the
attention and its residual (the poster of the comparison says before; its code, like XCiT, runs it after). Prefix tokens
are not changed. `lpi` alone is the comparison's form, x + conv(…). XCiT scales that branch by learned weights γ₃, one
per channel, as LayerScale scales the other branches, and applies the same stochastic depth: `xca:lpi,gamma=1` starts γ₃
at 1, as XCiT's models of 12 layers do, `gamma=1e-5` as those of 24.

A token that represents s tokens counts s times in the covariance. Shapes: B batch · H heads · N tokens · D head width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from .. import options
from ..errors import UserError
from .interface import Attention
from .registry import register
from .values import Context, Grid


def channel_map(q: Tensor, k: Tensor, temperature: Tensor) -> Tensor:
    """q, k [B, H, N, D], temperature [H, 1, 1] → the map of channels over channels [B, H, D, D]."""
    # Normalise first: the products then lie in [-1, 1] for any number of tokens, which half precision can represent.
    q, k = unit(q), unit(k)
    return torch.softmax(temperature * (q.transpose(-2, -1) @ k), dim=-1)


def plain_channel_map(q: Tensor, k: Tensor, tokens: Tensor | int) -> Tensor:
    """q, k [B, H, N, D], number of tokens (an int, or [B, 1, 1, 1]) → softmax(qᵀ k / √tokens) [B, H, D, D]."""
    # Without norms the sum over tokens may overflow half precision.
    with torch.autocast(q.device.type, enabled=False):
        return torch.softmax(wide(q).transpose(-2, -1) @ wide(k) * tokens**-0.5, dim=-1)


def unit(x: Tensor) -> Tensor:
    """x [B, H, N, D] with every channel divided by its norm over the tokens; the norm is summed in fp32 or wider."""
    return (wide(x) / torch.linalg.vector_norm(wide(x), dim=-2, keepdim=True).clamp_min(1e-12)).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if x is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LocalPatchInteraction(nn.Module):
    """conv(BN(GELU(conv(LN x)))), depthwise 3 × 3, on the patches [B, height·width, C]; XCiT's names inside.

    With `gamma` the result is scaled by γ₃, which starts at `gamma`, and dropped at the rate of `drop_path3`.
    """

    def __init__(self, dim: int, gamma: float = 0.0, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.norm = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory)
        self.bn = nn.BatchNorm2d(dim, **factory)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory)
        self.gamma3 = nn.Parameter(gamma * torch.ones(dim, **factory)) if gamma else None
        self.drop_path3 = DropPath(0.0) if gamma else nn.Identity()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        image = self.norm(x).transpose(1, 2).unflatten(2, (grid.height, grid.width))
        out = self.conv2(self.bn(F.gelu(self.conv1(image)))).flatten(2).transpose(1, 2)
        return out if self.gamma3 is None else self.drop_path3(self.gamma3 * out)


@dataclasses.dataclass(frozen=True)
class XCAOptions(options.Options):
    plain: bool = options.option(False, "no L2 norm and no temperature: the form the fair comparison measured")
    lpi: bool = options.option(False, "XCiT's local patch interaction after the attention")
    gamma: float = options.option(0.0, "initial value of the learned scale of that branch; 0: no scale", low=0)

    def __post_init__(self) -> None:
        if self.gamma and not self.lpi:
            raise UserError(f"gamma={self.gamma} needs lpi: it scales the local patch interaction")


@register
class XCA(Attention):
    name = "xca"
    Options = XCAOptions
    examples = ("xca", "xca:plain", "xca:lpi", "xca:lpi,gamma=1")

    def setup(self, factory: dict[str, Any]) -> None:
        if not self.options.plain:
            self.temperature = nn.Parameter(torch.ones(self.num_heads, 1, 1, **factory))
        if self.options.lpi:
            self.lpi = LocalPatchInteraction(self.dim, self.options.gamma, **factory)

    def no_weight_decay(self) -> set[str]:
        return set() if self.options.plain else {"temperature"}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        q, k, tokens = self._weighted(q, k, context.grid)
        attn = plain_channel_map(q, k, tokens) if self.options.plain else channel_map(q, k, self.temperature)
        return v @ self.attn_drop(attn).to(v.dtype).transpose(-2, -1), context

    def refine(self, x: Tensor, context: Context) -> Tensor:
        if not self.options.lpi:
            return x
        prefix, patches = x[:, : context.grid.prefix], x[:, context.grid.prefix :]
        return torch.cat([prefix, patches + self.lpi(patches, context.grid)], dim=1)

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """The share of each token in the covariance, [B, H, queries, N].

        Tokens do not attend to each other here, so there is no map of tokens over tokens. The share of a token is the
        size |q̂_n| |k̂_n| of the term that it adds to the covariance, normalised to sum to one. All tokens are mixed by
        the same matrix, so every row is the same. `channel_map` returns the D × D matrix itself.
        """
        q, k, _ = self.project(x)
        q, k, _ = self._weighted(q, k, context.grid)
        q, k = (q, k) if self.options.plain else (unit(q), unit(k))
        share = wide(q).norm(dim=-1) * wide(k).norm(dim=-1)
        share = share / share.sum(-1, keepdim=True).clamp_min(1e-12)
        rows = 1 if isinstance(query, int) else len(range(*query.indices(x.shape[1])))
        return share.to(x.dtype)[:, :, None].expand(-1, -1, rows, -1)

    def _weighted(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor | int]:
        """q and k with each token weighted by the number of tokens it represents, and the total of these numbers."""
        bias = grid.key_bias(torch.promote_types(q.dtype, torch.float32))
        if bias is None:
            return q, k, grid.tokens
        root = (bias / 2).exp()[:, None, :, None].to(q.dtype)
        return q * root, k * root, bias.exp().sum(-1)[:, None, None, None]

    def core_macs(self, grid: Grid) -> int:
        return 2 * grid.tokens * self.attn_dim * self.head_dim

    def extra_macs(self, grid: Grid) -> int:
        return 2 * 9 * grid.patches * self.dim if self.options.lpi else 0

    def refuses(self, grid: Grid) -> str | None:
        return "local patch interaction needs every patch in its place" if self.options.lpi and grid.reduced else None
