"""Attention scores passed from one stage of a hierarchical backbone to the next, with fewer tokens and other heads.

LaViT calls this residual attention downsampling: the scores of the last layer of a stage are added to those of the
first layer of the next stage. A layer that computes no scores, such as `lavit`, uses them as its own.

    added = heads(norm(pool(A)))        pool on both axes of A, heads a 1 × 1 convolution, norm over each row's keys
    taken = pool(A)

A token of the new stage replaces a few tokens of the old one, so the peak of a query must keep its place on the grid.
There are three ways to pool. `grid` averages the tokens that become one, on both axes. `conv` trains their weights: a
depthwise 4 × 4 convolution at stride 4, after tokens are ordered so that the four that become one are adjacent (in
row-major order it would mix distant patches). `interp` resamples A bilinearly. Keys whose number does not change, such
as PVT's 49, are not pooled. Prefix tokens of the old stage are dropped; those of the new stage get 0.

Shapes: B batch · H heads · N queries · M keys.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Attention, Grid
from ..attention.scores import score_shape
from ..errors import UserError

Kind = Literal["none", "grid", "conv", "interp"]


def key_grid(grid: Grid, keys: int) -> Grid:
    """The grid of `keys` keys, that are tokens of `grid` or square blocks of them; the number gives the block."""
    for ratio in range(1, max(grid.height, grid.width) + 1):
        found = Grid(max(1, grid.height // ratio), max(1, grid.width // ratio), grid.prefix)
        if found.tokens == keys:
            return found
    raise UserError(f"{keys} keys are not made of blocks of grid {grid}")


class Carry(nn.Module):
    """Scores [B, H, N, M] of the stage before, whose last attention is `before` → for this one's first attention."""

    def __init__(self, kind: Kind, before: Attention, first: Attention, downsample: Any) -> None:
        super().__init__()
        self.kind = kind
        self.added, self.keys_shrink = self._plan(before, first)
        heads = before.num_heads
        if kind == "conv":
            if getattr(downsample, "stride", None) != 2:
                raise UserError("carry='conv' weighs the 2 × 2 patches that become one: a stride of 2 is required")
            kernel = (4, 4 if self.keys_shrink else 1)
            self.pool = nn.Conv2d(heads, heads, kernel, kernel, groups=heads, bias=False)
            nn.init.constant_(self.pool.weight, 1 / (kernel[0] * kernel[1]))
        if self.added:
            self.heads = nn.Conv2d(heads, first.num_heads, 1)
            nn.init.constant_(self.heads.weight, 1 / heads)
            nn.init.zeros_(self.heads.bias)  # type: ignore[arg-type]

    def _plan(self, before: Attention, first: Attention) -> tuple[bool, bool]:
        """Whether the scores are added to those of the first attention or replace them; whether keys are pooled."""
        left, wanted = score_shape(before, 1, before.grid), score_shape(first, 1, first.grid)
        if "scores" not in before.provides or len(left) != 4:
            raise UserError(f"carry={self.kind!r}: {before.spec} ends a stage, but provides no scores of its tokens")
        if not (first.reads | first.takes) & {"scores", "residual"} or len(wanted) != 4:
            raise UserError(f"carry={self.kind!r}: {first.spec} begins a stage, but does not read scores")
        if "scores" in first.reads and before.num_heads != first.num_heads:
            raise UserError(f"{first.spec} begins a stage of {first.num_heads} heads, but reads {before.num_heads}")
        shrink = key_grid(before.grid, left[-1]).patches != key_grid(first.grid, wanted[-1]).patches
        return "scores" not in first.reads, shrink

    def check(self, before: Attention, first: Attention) -> None:
        """Raise unless this module was built for such attentions."""
        if self._plan(before, first) != (self.added, self.keys_shrink):
            raise UserError(f"carry={self.kind!r} was built for other attentions than {before.spec} and {first.spec}")

    def forward(self, scores: Tensor, before: Grid, after: Grid, keys: int, downsample: Any) -> Tensor:
        """`keys` is the number of keys of this stage's first attention."""
        old_keys, new_keys = key_grid(before, scores.shape[-1]), key_grid(after, keys)
        if self.kind == "conv":
            scores = _by_cells(scores.mT, before).mT
            scores = self.pool(_by_cells(scores, old_keys) if self.keys_shrink else scores[..., old_keys.prefix :])
        else:
            scores = self._resized(scores.mT, before, after, downsample).mT
            scores = self._resized(scores, old_keys, new_keys, downsample)
        if self.added:
            scores = self.heads(F.layer_norm(scores, scores.shape[-1:]))
        return F.pad(scores, (new_keys.prefix, 0, after.prefix, 0))

    def _resized(self, scores: Tensor, old: Grid, new: Grid, downsample: Any) -> Tensor:
        """The last axis [..., old tokens] → [..., new patches]."""
        patches = scores[..., old.prefix :]
        if (old.height, old.width) == (new.height, new.width):
            return patches
        maps = patches.flatten(0, -2)[:, None].unflatten(2, (old.height, old.width))
        if self.kind == "interp":
            line = new.height == 1 != old.height
            maps = maps.flatten(2)[:, :, None] if line else maps
            found = F.interpolate(maps, (new.height, new.width), mode="bilinear", antialias=True)
        else:
            found = downsample.average(maps)
            if found.shape[2:] != (new.height, new.width):  # reduced keys, with another ratio in the new stage
                found = F.adaptive_avg_pool2d(maps, (new.height, new.width))
        return found.flatten(1).unflatten(0, scores.shape[:-1])

    def macs(self, queries: int, keys: int) -> int:
        """MACs for `queries` and `keys` of the new stage."""
        return queries * keys * sum(conv.weight.numel() for conv in self.children())  # type: ignore[misc,operator]


def _by_cells(scores: Tensor, grid: Grid) -> Tensor:
    """Reorder patches on the last axis from row-major to cell-major (2 × 2 cells), padded to whole cells by repeating
    the last row or column."""
    maps = scores[..., grid.prefix :].unflatten(-1, (grid.height, grid.width))
    flat = F.pad(maps.flatten(0, -3), (0, grid.width % 2, 0, grid.height % 2), mode="replicate")
    height, width = flat.shape[-2:]
    cells = flat.unflatten(-1, (width // 2, 2)).unflatten(-3, (height // 2, 2)).transpose(-3, -2)
    return cells.flatten(1).unflatten(0, scores.shape[:-1])
