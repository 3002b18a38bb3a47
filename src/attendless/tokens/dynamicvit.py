"""DynamicViT: a small learned predictor selects the patches to keep.

    z = GELU(W LN(x)),  local half of its channels beside the mean of the other half over the patches still there
    log π = log softmax(MLP(z))                      two numbers for each patch: keep, drop
    evaluation  the ⌊ρˢ n⌋ patches with the largest log π(keep) stay, n the patches of the whole grid
    training    a straight-through Gumbel draw keeps or removes each patch that is still there; removed patches are
                masked as keys (`attention.masking`), so that each image keeps its own number, and a loss pulls the
                kept share to ρˢ

before the blocks `at`, the s-th of them with share ρˢ. Weights have the official names, and start as in the authors'
code. `full` attention masks exactly as the authors do; others give a masked key a weight of nearly zero.
"""

from __future__ import annotations

import dataclasses

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from .. import options
from ..attention import Context, Grid, Macs
from .interface import Reducer
from .keeping import keep
from .registry import register_reducer


@dataclasses.dataclass(frozen=True)
class DynamicViTOptions(options.Options):
    keep: float = options.option(0.7, "share of the patches that stay each time", low=0, high=1)
    at: tuple[int, ...] = options.option((3, 6, 9), "blocks before which patches are removed", low=0)
    ratio: float = options.option(2.0, "weight of the loss that pulls the kept share to its target", low=0)


@register_reducer
class DynamicViT(Reducer):
    name = "dynamicvit"
    Options = DynamicViTOptions
    first = True
    drops = True
    examples = ("dynamicvit:keep=0.5,at=1", "dynamicvit:keep=0.7,at=1/2")
    not_searched = "dynamicvit needs a predictor that was trained for its layers and its share of patches"

    def setup(self) -> None:
        dim = self.dim
        self.in_conv = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.out_conv = nn.Sequential(
            nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, dim // 4), nn.GELU(), nn.Linear(dim // 4, 2)
        )
        for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
            trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    @classmethod
    def layers(cls, given: DynamicViTOptions, depth: int) -> list[int]:
        return sorted(given.at) if given.keep < 1 else []

    @property
    def share(self) -> float:
        """The share of all patches that remain after this layer."""
        return self.options.keep ** (1 + sorted(self.options.at).index(self.layer))

    def remaining(self, grid: Grid) -> int:
        return max(1, min(grid.patches, int(self.share * grid.area)))

    def macs(self, grid: Grid) -> Macs:
        width = self.dim
        weights = width * width + width * (width // 2) + (width // 2) * (width // 4) + (width // 4) * 2
        return Macs(other=grid.patches * weights)

    def log_odds(self, x: Tensor, policy: Tensor) -> Tensor:
        """log π [B, n, 2] of patches x [B, n, C], of which `policy` [B, n] are still there."""
        local, whole = self.in_conv(x).chunk(2, dim=-1)
        there = policy.sum(1).clamp(min=1e-6)  # training may mask all patches of an image
        mean = (whole * policy[..., None]).sum(1, keepdim=True) / there[:, None, None]
        return F.log_softmax(self.out_conv(torch.cat([local, mean.expand_as(local)], dim=-1)), dim=-1)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        return self.mask(x, context) if self.training else self.gather(x, context)

    def gather(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, P = context.grid, context.grid.prefix
        patches = x[:, P:]
        score = self.log_odds(patches, patches.new_ones(patches.shape[:2]))[..., 0]
        x, left = keep(x, grid, score, self.remaining(grid))
        return x, context.replace(grid=left)

    def mask(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, P = context.grid, context.grid.prefix
        patches = x[:, P:]
        before = patches.new_ones(patches.shape[:2]) if grid.sizes is None else grid.sizes
        stays = F.gumbel_softmax(self.log_odds(patches, before), hard=True, dim=-1)[..., 0]
        policy = stays * before
        left = dataclasses.replace(grid, cells=grid.places(x), sizes=policy, weighting="mask")
        gap = (policy.mean(1) - self.share).square().mean()
        context = context.with_loss("ratio", self.options.ratio / len(self.options.at) * gap)
        return x, context.replace(grid=left)
