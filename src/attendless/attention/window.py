"""Window attention (Swin): every patch attends to the patches of its own window.

    out_i = Σ_j softmax_j(q_i·k_j / √D + b(y_i - y_j, x_i - x_j)) v_j        j in the window of i, or a prefix token

A patch at (y, x) belongs to window (⌊(y - shift) / size⌋, ⌊(x - shift) / size⌋): Swin alternates `window` with
`window:shift=3` from layer to layer. b is Swin's learned relative position bias, one table per head. It starts at zero,
which does not change a pretrained model; in a model built to be trained from scratch it starts as in Swin: normal with
standard deviation 0.02, truncated at 2. `window:bias=false` in every layer is what the code of the fair comparison
runs: its numbers for "Swin" (28.27 M, 4.528 G at patch 4, window 7; window 8 at patch 7) belong to plain windows that
never shift, Swin's own numbers to the alternation with bias.

Each frame of a video has windows of its own.

Prefix tokens are global: they attend to all tokens, and every patch attends to them (without a bias).

Any grid: a side that is not a multiple of `size` is padded, and no token attends to padding. A side no longer than the
window is one unshifted window, while the other side is cut and shifted as usual; the middle of the bias table is used.
This is timm's rule, with which Swin's weights run there. (Swin's own code considers both sides at once: if the shorter
is no longer than the window, windows are squares of that length, and unshifted. On square grids the rules are equal.)

Windows are cut by reshaping, so cost is linear in the tokens. Shifted windows follow Swin: the grid is rolled, and
where a window then holds patches from two ends of the grid, a mask separates them. (Where a grid needs padding timm's
Swin differs: its patches also attend to the padding and, shifted, across the edge. On multiples of the window both are
equal.)

Shapes: B batch · H heads · D head width · P prefix tokens · W windows · T patches of a window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import options
from ..errors import UserError
from ..sparse import fused
from ..sparse.backend import Choice
from ..sparse.full import attend as full
from .registry import register
from .scores import OwnScoreShape
from .values import Context, Grid


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of the grid cut into `count` windows of `size` cells, the first of which starts at cell `shift`."""

    cells: int
    size: int
    shift: int

    @classmethod
    def cut(cls, cells: int, size: int, shift: int) -> Side:
        return cls(cells, size, shift) if cells > size else cls(cells, cells, 0)

    @property
    def count(self) -> int:
        return -(-self.cells // self.size)

    @property
    def padding(self) -> int:
        return self.count * self.size - self.cells

    def regions(self, device: torch.device) -> Tensor:
        """The window of each cell before rolling, in rolled order [count, size]; -1 for padding."""
        cell = torch.arange(self.count * self.size, device=device).roll(-self.shift)
        window = torch.div(cell - self.shift, self.size, rounding_mode="floor") + 1
        return torch.where(cell < self.cells, window, -1).view(self.count, self.size)


def partition(x: Tensor, rows: Side, columns: Side) -> Tensor:
    """Patches [B, H, N, D] → windows [B, H, W, T, D], frame by frame."""
    heads, x = x.shape[1], x.unflatten(2, (-1, rows.cells * columns.cells)).flatten(1, 2)
    x = F.pad(x.unflatten(2, (rows.cells, columns.cells)), (0, 0, 0, columns.padding, 0, rows.padding))
    if rows.shift or columns.shift:
        x = x.roll((-rows.shift, -columns.shift), dims=(2, 3))
    x = x.unflatten(3, (columns.count, columns.size)).unflatten(2, (rows.count, rows.size))
    return x.transpose(3, 4).flatten(4, 5).flatten(2, 3).unflatten(1, (heads, -1)).flatten(2, 3)


def unpartition(x: Tensor, rows: Side, columns: Side) -> Tensor:
    """Windows [B, H, W, T, D] → patches [B, H, N, D]; padding is dropped."""
    heads, x = x.shape[1], x.unflatten(2, (-1, rows.count * columns.count)).flatten(1, 2)
    x = x.unflatten(3, (rows.size, columns.size)).unflatten(2, (rows.count, columns.count))
    x = x.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    if rows.shift or columns.shift:
        x = x.roll((rows.shift, columns.shift), dims=(2, 3))
    return x[:, :, : rows.cells, : columns.cells].flatten(2, 3).unflatten(1, (heads, -1)).flatten(2, 3)


def visible(rows: Side, columns: Side, device: torch.device) -> Tensor | None:
    """Which patches of a window may attend to each other [W, T, T], or None if all may."""
    if not (rows.shift or columns.shift or rows.padding or columns.padding):
        return None
    y = rows.regions(device)[:, None, :, None]
    x = columns.regions(device)[None, :, None, :]
    # Padding is a region of its own and attends to itself, so that no row of the softmax is empty.
    region = torch.where((y < 0) | (x < 0), -1, y * (columns.count + 1) + x).flatten(2).flatten(0, 1)
    return region[:, :, None] == region[:, None, :]


def relative_bias(table: Tensor, size: int, rows: Side, columns: Side) -> Tensor:
    """Swin's table [(2 size - 1)², H], by offset of query from key, row by row → [H, T, T]."""
    y, x = (torch.arange(side.size, device=table.device) for side in (rows, columns))
    y, x = y[:, None] - y[None, :] + size - 1, x[:, None] - x[None, :] + size - 1
    index = y[:, None, :, None] * (2 * size - 1) + x[None, :, None, :]
    return table[index.flatten()].view(rows.size * columns.size, -1, table.shape[1]).permute(2, 0, 1)


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Side,
    columns: Side,
    *,
    prefix: int = 0,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """q, k, v [B, H, P + patches, ·], bias [H, T, T] → [B, H, P + patches, ·]."""
    queries, keys, values = (partition(t[:, :, prefix:], rows, columns) for t in (q, k, v))
    keys, values = _see_prefix(keys, k[:, :, :prefix]), _see_prefix(values, v[:, :, :prefix])
    mask = _mask(visible(rows, columns, q.device), bias, prefix, queries)
    if mask is not None and mask.shape[1] > 1:  # the windows of one frame, repeated for every frame
        mask = mask.repeat(1, queries.shape[2] // mask.shape[1], 1, 1)
    out = full_windows(queries, keys, values, mask, scale=scale, dropout=dropout)
    out = unpartition(out, rows, columns)
    if not prefix:
        return out
    return torch.cat([full(q[:, :, :prefix], k, v, scale=scale, dropout=dropout), out], dim=2)


def full_windows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, dropout: float) -> Tensor:
    """Full attention inside each window: q, k, v [B, H, W, ·, ·], mask [1 or H, 1 or W, T, P + T] → [B, H, W, T, ·]."""
    # Windows are folded into heads, not into the batch, so that one mask serves every image.
    H, W = q.shape[1:3]
    if mask is not None:
        mask = mask.expand(H, W, -1, -1).flatten(0, 1)[None]
    q, k, v = (t.flatten(1, 2) for t in (q, k, v))
    out = fused.attend(q, k, v, mask, scale=scale, dropout=dropout)
    return out.unflatten(1, (H, W))


def _see_prefix(windows: Tensor, prefix: Tensor) -> Tensor:
    """Put the prefix tokens [B, H, P, D] in front of every window [B, H, W, T, D]."""
    if not prefix.shape[2]:
        return windows
    return torch.cat([prefix[:, :, None].expand(-1, -1, windows.shape[2], -1, -1), windows], dim=3)


def _mask(allowed: Tensor | None, bias: Tensor | None, prefix: int, like: Tensor) -> Tensor | None:
    """The additive or boolean mask of the scores, [1 or H, 1 or W, T, P + T]; None if neither is needed."""
    if bias is None:
        return None if allowed is None else F.pad(allowed, (prefix, 0), value=True)[None]
    mask = bias.to(like.dtype)[:, None]
    if allowed is not None:
        mask = mask.masked_fill(~allowed[None], -torch.inf)
    return F.pad(mask, (prefix, 0))


@dataclasses.dataclass(frozen=True)
class WindowOptions(options.Options):
    size: int = options.option(7, "patches along a side of a window", low=1)
    shift: int = options.option(0, "shift of the windows in patches (Swin: half a window, every other layer)", low=0)
    bias: bool = options.option(True, "Swin's learned relative position bias")

    def __post_init__(self) -> None:
        if self.shift >= self.size:
            raise UserError(f"option shift={self.shift} is out of range: expected less than size={self.size}")


@register
class Window(OwnScoreShape):
    name = "window"
    frames = True
    provides = frozenset({"scores", "class_attention", "keys"})
    Options = WindowOptions
    examples = ("window", "window:size=4,shift=2", "window:size=3,bias=false", "window:size=5,shift=2,bias=false")

    def setup(self, factory: dict[str, Any]) -> None:
        if self.options.bias:
            offsets = (2 * self.options.size - 1) ** 2
            self.relative_position_bias_table = nn.Parameter(torch.zeros(offsets, self.num_heads, **factory))

    def init_weights(self) -> None:
        if self.options.bias:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def no_weight_decay(self) -> set[str]:
        return {"relative_position_bias_table"} if self.options.bias else set()

    def sides(self, grid: Grid) -> tuple[Side, Side]:
        size, shift = self.options.size, self.options.shift
        return Side.cut(grid.height, size, shift), Side.cut(grid.width, size, shift)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        rows, columns = self.sides(context.grid)
        bias = None
        if self.options.bias:
            bias = relative_bias(self.relative_position_bias_table, self.options.size, rows, columns)
        prefix = context.grid.prefix
        out = window(q, k, v, rows, columns, prefix=prefix, scale=self.scale, bias=bias, dropout=self.dropout)
        if "scores" in context.wants:
            queries, keys = (partition(t[:, :, prefix:], rows, columns) for t in (q, k))
            scores = self.scale * queries @ _see_prefix(keys, k[:, :, :prefix]).transpose(-2, -1)
            context = context.replace(scores=scores if bias is None else scores + F.pad(bias, (prefix, 0))[:, None])
        return out, context

    def score_shape(self, batch: int, grid: Grid) -> tuple[int, ...]:
        """Scores of the patches of each window, without the mask."""
        rows, columns = self.sides(grid)
        patches, windows = rows.size * columns.size, grid.depth * rows.count * columns.count
        return (batch, self.num_heads, windows, patches, grid.prefix + patches)

    def leaving_macs(self, grid: Grid, wants: Collection[str]) -> int:
        """The fused kernel returns no scores, so they are computed a second time."""
        macs = super().leaving_macs(grid, wants)
        *_, windows, queries, keys = self.score_shape(1, grid)
        return macs + windows * queries * keys * self.attn_dim if "scores" in wants else macs

    def core_macs(self, grid: Grid) -> int:
        """Windows at their full size, padding included, as Swin counts them and as they are computed."""
        rows, columns = self.sides(grid)
        windows, patches = grid.depth * rows.count * columns.count, rows.size * columns.size
        pairs = windows * patches * (patches + grid.prefix) + grid.prefix * grid.tokens
        return 2 * pairs * self.attn_dim

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        rows, columns = self.sides(grid)
        return Choice("sdpa", f"{rows.count}x{columns.count} windows of {rows.size}x{columns.size}, cut by reshaping")
