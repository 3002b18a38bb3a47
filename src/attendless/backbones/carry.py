"""Scores carried from one stage of a pyramid to the next, whose tokens are fewer and whose heads are others.

LaViT calls it residual attention downsampling: what the last layer of a stage looked at is added to what the first of
the next one looks at. A layer that computes no scores, such as `less`, takes them for its own instead.

    added = heads(norm(pool(A)))        pool on both axes of A, heads a 1 × 1 convolution, norm over each row's keys
    taken = pool(A)

A token of the new stage stands where a few of the old stood, so a query's peak must stay where it was, in rows and in
columns of the grid. Three ways to pool do that: `grid` averages the tokens that become one, on both axes; `conv` learns
their weights (a depthwise 4 × 4 convolution at stride 4, once tokens are ordered so that the four that become one
follow each other; over A as it lies, row by row, it would mix distant patches); `interp` resamples A bilinearly. Keys
that do not become fewer, as PVT's 49, are left. Prefix tokens of the old stage are dropped; those of the new one get 0.

Shapes: B batch · H heads · N queries · M keys.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Attention, Grid
from ..errors import UserError

Kind = Literal["none", "grid", "conv", "interp"]


def key_grid(grid: Grid, keys: int) -> Grid:
    """The grid of `keys` keys made of the tokens of `grid`: the tokens, or blocks of them. Both sides shrink with the
    block, so their number tells."""
    for ratio in range(1, max(grid.height, grid.width) + 1):
        found = Grid(max(1, grid.height // ratio), max(1, grid.width // ratio), grid.prefix)
        if found.tokens == keys:
            return found
    raise UserError(f"{keys} keys are not made of blocks of grid {grid}")


class Carry(nn.Module):
    """Scores [B, H, N, M] of the stage before, whose last attention is `before` → for this one's first attention."""

    provides = frozenset({"scores"})

    def __init__(self, kind: Kind, before: Attention, first: Attention, downsample: Any) -> None:
        super().__init__()
        left, wanted = before.score_shape(1, before.grid), first.score_shape(1, first.grid)
        if "scores" not in before.provides or len(left) != 4:
            raise UserError(f"carry={kind!r}: {before.spec} ends a stage, but has no scores of its tokens to leave")
        if not (first.reads | first.takes) & {"scores", "residual"} or len(wanted) != 4:
            raise UserError(f"carry={kind!r}: {first.spec} begins a stage, but has no use for scores of the one before")
        self.kind, self.added, self.grid = kind, "scores" not in first.reads, first.grid
        self.keys_shrink = key_grid(before.grid, left[-1]).patches != key_grid(first.grid, wanted[-1]).patches
        self.shape = (left[1] if not self.added else wanted[1], wanted[-1])
        if kind == "conv":
            if getattr(downsample, "stride", None) != 2:
                raise UserError("carry='conv' weighs the 2 × 2 patches that become one: it needs a stride of 2")
            self.pool = nn.Conv2d(left[1], left[1], (4, 4 if self.keys_shrink else 1), groups=left[1], bias=False)
            self.pool.stride = self.pool.kernel_size
            nn.init.constant_(self.pool.weight, 1 / self.pool.weight[0].numel())
        if self.added:
            self.heads = nn.Conv2d(left[1], wanted[1], 1)
            nn.init.constant_(self.heads.weight, 1 / left[1])
            nn.init.zeros_(self.heads.bias)  # type: ignore[arg-type]

    def score_shape(self, batch: int, grid: Grid) -> tuple[int, ...]:
        """As an attention says it: what the first layer finds."""
        return (batch, self.shape[0], grid.tokens, self.shape[1])

    def forward(self, scores: Tensor, before: Grid, after: Grid, keys: int, downsample: Any) -> Tensor:
        """`keys` is how many the first attention of this stage has."""
        old_keys, new_keys = key_grid(before, scores.shape[-1]), key_grid(after, keys)
        if self.kind == "conv":
            scores = _by_cells(scores.mT, before).mT
            if self.keys_shrink:
                scores = _by_cells(scores, old_keys)
            else:
                scores = scores[..., old_keys.prefix :]
            scores = self.pool(scores)
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
            if found.shape[2:] != (new.height, new.width):  # keys that were fewer than tokens, and are so otherwise
                found = F.adaptive_avg_pool2d(maps, (new.height, new.width))
        return found.flatten(1).unflatten(0, scores.shape[:-1])

    def macs(self, queries: int, keys: int) -> int:
        """For so many queries and keys of the new stage."""
        return queries * keys * sum(conv.weight.numel() for conv in self.children())  # type: ignore[misc,operator]


def _by_cells(scores: Tensor, grid: Grid) -> Tensor:
    """Patches on the last axis, row by row → the four of each 2 × 2 cell one after the other, padded to whole cells by
    repeating the last."""
    maps = scores[..., grid.prefix :].unflatten(-1, (grid.height, grid.width))
    flat = F.pad(maps.flatten(0, -3), (0, grid.width % 2, 0, grid.height % 2), mode="replicate")
    height, width = flat.shape[-2:]
    cells = flat.unflatten(-1, (width // 2, 2)).unflatten(-3, (height // 2, 2)).transpose(-3, -2)
    return cells.flatten(1).unflatten(0, scores.shape[:-1])
