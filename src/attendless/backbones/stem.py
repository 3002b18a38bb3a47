"""Embeddings: from images to tokens, and from the tokens of one stage to those of the next.

Each embedding takes a map [B, C, height, width] and returns tokens [B, N, C]. `shrunk` gives the new grid, `average`
downsamples other maps by the same factor. A side that the stride does not divide is padded, so the new side is
⌈side / stride⌉ and no pixel is lost.
"""

from __future__ import annotations

import torch
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Grid
from ..errors import UserError
from .cost import weight_macs


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """Tokens [B, N, C] → map [B, C, height, width], without the prefix tokens."""
    return x[:, grid.prefix :].transpose(1, 2).unflatten(2, (grid.height, grid.width))


def to_tokens(x: Tensor) -> Tensor:
    """Map [B, C, height, width] → tokens [B, N, C]."""
    return x.flatten(2).transpose(1, 2)


def shrink(grid: Grid, stride: int) -> Grid:
    """The grid after an embedding of `stride`; prefix tokens are not carried over."""
    return Grid(-(-grid.height // stride), -(-grid.width // stride))


class ConvEmbed(nn.Module):
    """Patches of `stride` by a convolution, overlapping if its kernel is larger (PVT v2), and a norm."""

    #: The image size of the model, stored in its first embedding as in timm.
    img_size: tuple[int, int] = (0, 0)

    def __init__(
        self, in_chans: int, dim: int, stride: int, *, overlap: bool = False, eps: float = 1e-5, norm: bool = True
    ) -> None:
        super().__init__()
        self.stride, self.overlap = stride, overlap
        kernel = 2 * stride - 1 if overlap else stride
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding=(kernel // 2 if overlap else 0))
        self.norm = nn.LayerNorm(dim, eps=eps) if norm else nn.Identity()

    def shrunk(self, grid: Grid) -> Grid:
        return shrink(grid, self.stride)

    def average(self, maps: Tensor) -> Tensor:
        return F.avg_pool2d(maps, self.stride, ceil_mode=True, count_include_pad=False)

    def macs(self, grid: Grid) -> int:
        """MACs for one image that becomes `grid`."""
        return weight_macs(self, grid.patches)

    def forward(self, x: Tensor) -> Tensor:
        if not self.overlap:
            x = F.pad(x, (0, -x.shape[3] % self.stride, 0, -x.shape[2] % self.stride))
        return self.norm(to_tokens(self.proj(x)))


class HalvingEmbed(ConvEmbed):
    """The same stride by 3 × 3 convolutions, each of which halves the sides and doubles the width; BatchNorm and GELU
    stand between them. On small data sets they train faster than one layer of large patches."""

    def __init__(self, in_chans: int, dim: int, stride: int, *, eps: float = 1e-5) -> None:
        steps = stride.bit_length() - 1
        if stride != 2**steps or dim % 2**steps:
            raise UserError(
                f"a stem that halves needs a patch of 2, 4, 8, … that divides the width, got {stride}, {dim}"
            )
        widths = [dim >> left for left in reversed(range(steps))]
        super().__init__(widths[-2] if steps > 1 else in_chans, dim, 2, overlap=True, eps=eps)
        self.stride = stride
        self.halving = nn.Sequential()
        for width, wider in zip([in_chans, *widths], widths[:-1], strict=False):
            self.halving.append(nn.Conv2d(width, wider, 3, 2, padding=1, bias=False))
            self.halving.append(nn.BatchNorm2d(wider))
            self.halving.append(nn.GELU())

    def macs(self, grid: Grid) -> int:
        convolutions = [m for m in self.halving if isinstance(m, nn.Conv2d)]
        counts = [
            4**left * m.weight.numel() for left, m in zip(range(len(convolutions), 0, -1), convolutions, strict=True)
        ]
        return grid.patches * (sum(counts) + self.proj.weight.numel())

    def forward(self, x: Tensor) -> Tensor:
        # Channels last, as tokens are; convolutions are faster in this layout.
        return self.norm(to_tokens(self.proj(self.halving(x.contiguous(memory_format=torch.channels_last)))))


class Merge(PatchMerging):
    """Swin's merging of 2 × 2 tokens: their channels side by side, a norm, a linear layer."""

    stride = 2

    def __init__(self, in_chans: int, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(in_chans, dim)
        self.norm = nn.LayerNorm(4 * in_chans, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).flatten(1, 2)

    def shrunk(self, grid: Grid) -> Grid:
        return shrink(grid, self.stride)

    def average(self, maps: Tensor) -> Tensor:
        return F.avg_pool2d(maps, self.stride, ceil_mode=True, count_include_pad=False)


class LinePool(nn.Module):
    """HVT's pooling: a maximum over three consecutive tokens in row-major order, at stride 2. The result is a grid of
    one row."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool1d(x.flatten(2), 3, 2).transpose(1, 2)

    def shrunk(self, grid: Grid) -> Grid:
        return Grid(1, (grid.patches - 3) // 2 + 1)

    def average(self, maps: Tensor) -> Tensor:
        """The mean over the same three positions."""
        return F.avg_pool1d(maps.flatten(2), 3, 2)[:, :, None]
