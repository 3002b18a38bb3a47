"""How images become tokens, and how one stage's tokens become the next stage's: fewer and wider.

Each takes a map [B, C, height, width] and gives tokens [B, N, C], says what becomes of a grid (`shrunk`) and averages
other maps as coarsely (`average`); a side that its stride does not divide is padded, so
that the new side is always ⌈side / stride⌉ and nothing of an image is cut off.
"""

from __future__ import annotations

from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Grid


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

    #: The image size a model's first embedding was made for; kept here as timm's embeddings do.
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

    def forward(self, x: Tensor) -> Tensor:
        if not self.overlap:
            x = F.pad(x, (0, -x.shape[3] % self.stride, 0, -x.shape[2] % self.stride))
        return self.norm(to_tokens(self.proj(x)))


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
    """HVT's pooling: of tokens as they follow each other, row by row, the maximum of three, at every second. What is
    left is a line: a grid of one row."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool1d(x.flatten(2), 3, 2).transpose(1, 2)

    def shrunk(self, grid: Grid) -> Grid:
        return Grid(1, (grid.patches - 3) // 2 + 1)

    def average(self, maps: Tensor) -> Tensor:
        """The mean of the three where tokens take their maximum."""
        return F.avg_pool1d(maps.flatten(2), 3, 2)[:, :, None]
