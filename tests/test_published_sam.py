"""SAM's published code, alone and as Cellpose-SAM has it: all layers global, another patch size and position table.

Without the package `segment_anything`, an encoder of the same names, attributes and equations stands in for it.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attendless

HOME = "segment_anything.modeling.image_encoder"


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, side: int) -> None:
        super().__init__()
        self.num_heads, self.scale, self.use_rel_pos = heads, (dim // heads) ** -0.5, True
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rel_pos_h, self.rel_pos_w = (nn.Parameter(torch.zeros(2 * side - 1, dim // heads)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        q, k, v = self.qkv(x).view(B, H * W, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        on_grid = q.unflatten(2, (H, W))
        rows = torch.einsum("bhyxd,ykd->bhyxk", on_grid, self._table(H, self.rel_pos_h))
        columns = torch.einsum("bhyxd,xkd->bhyxk", on_grid, self._table(W, self.rel_pos_w))
        bias = (rows[..., :, None] + columns[..., None, :]).flatten(2, 3).flatten(3)
        out = (self.scale * q @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(B, H, W, C))

    def _table(self, side: int, weights: Tensor) -> Tensor:
        """By position of query and key; resampled to the grid."""
        found = F.interpolate(weights.T[None], size=2 * side - 1, mode="linear")[0].T
        at = torch.arange(side)
        return found[at[:, None] - at[None, :] + side - 1]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, window: int, side: int) -> None:
        super().__init__()
        self.attn, self.window_size = Attention(dim, heads, window or side), window
        self.norm1, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        shortcut, x, side = x, self.norm1(x), self.window_size
        if side:
            x = x.view(B, H // side, side, W // side, side, C).transpose(2, 3).reshape(-1, side, side, C)
        x = self.attn(x)
        if side:
            x = x.view(B, H // side, W // side, side, side, C).transpose(2, 3).reshape(B, H, W, C)
        x = shortcut + x
        return x + self.mlp(x)


class ImageEncoderViT(nn.Module):
    def __init__(self, img_size: int, patch_size: int, embed_dim: int, num_heads: int, window_size: int) -> None:
        super().__init__()
        side = img_size // patch_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, embed_dim, patch_size, stride=patch_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, side, side, embed_dim))
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, window, side) for window in (window_size, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj(x).permute(0, 2, 3, 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return x


for stand_in in (Attention, ImageEncoderViT):
    stand_in.__module__ = HOME


def encoder() -> Any:
    """Two layers for images of 64 px: 8 × 8 patches, the first layer in windows of 4 × 4."""
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "window_size": 4}
    torch.manual_seed(0)
    try:
        home: Any = importlib.import_module(HOME)
        made = home.ImageEncoderViT(
            **sizes, depth=2, mlp_ratio=2, out_chans=16, use_rel_pos=True, global_attn_indexes=(1,)
        )
    except ImportError:
        made = ImageEncoderViT(**sizes)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(0.2 * torch.randn_like(value) + (value.ndim == 1))
    return made.eval()


def cellpose() -> Any:
    """As Cellpose changes the encoder: smaller patches, fewer positions, and no windows."""
    made = encoder()
    made.patch_embed.proj = nn.Conv2d(3, 32, 4, stride=4)
    made.pos_embed = nn.Parameter(made.pos_embed[:, ::2, ::2].repeat(1, 3, 3, 1))
    for block in made.blocks:
        block.window_size = 0
    return made


@pytest.mark.parametrize(
    ("make", "pixels", "layers"),
    [
        (encoder, 64, [("blocks.0", "4x4", "kept"), ("blocks.1", "8x8", "converted")]),
        (cellpose, 48, [("blocks.0", "12x12", "converted"), ("blocks.1", "12x12", "converted")]),
    ],
)
def test_attending_to_everything_is_the_original(make: Any, pixels: int, layers: list[Any]) -> None:
    model = make()
    torch.manual_seed(1)
    x = torch.randn(2, 3, pixels, pixels)
    plain = model(x)
    (slope,) = torch.autograd.grad((plain**2).sum(), model.blocks[1].attn.rel_pos_h)
    for attention in ("foveal:keep=1", "full"):
        report = attendless.patch(model, attention, below_breakeven="keep")
        torch.testing.assert_close(model(x), plain, atol=1e-4, rtol=1e-4)
        (ours,) = torch.autograd.grad((model(x) ** 2).sum(), model.blocks[1].attn.rel_pos_h)
        torch.testing.assert_close(ours, slope, atol=1e-3 * float(slope.abs().max()), rtol=1e-3)
        if attention != "full":
            assert [(row.name, row.grid, row.decision) for row in report.layers] == layers
            assert report.size == (pixels, pixels)
    attendless.patch(model, "foveal:keep=0.1", below_breakeven="keep")
    assert not torch.allclose(model(x), plain, atol=1e-3)
    attendless.unpatch(model)
    assert torch.equal(model(x), plain)
