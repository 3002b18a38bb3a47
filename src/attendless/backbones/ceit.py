"""CeiT: an isotropic backbone with convolutions in the stem and in the MLPs.

    stem      7 × 7 at stride 2, BatchNorm, a maximum over 3 × 3 at stride 2; then patches of a quarter of the size
    MLP       1 × 1, depthwise 3 × 3, 1 × 1, each with BatchNorm, GELU after the first two; on the patches alone:
              the normed class token is passed through, so the residual connection gives x + norm(x)
    output    an embedding of its layer is added to every layer's class token; the last attends to all, then an MLP

The class tokens travel in the context (`trail`); the first token of the last layer's output is classified.
Weights are initialised as in the authors' code: linear layers and tokens from N(0, 0.02²), convolutions as in PyTorch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed, trunc_normal_
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Context, Grid
from ..errors import UserError
from .block import ConvBlock
from .columnar import ColumnarBackbone
from .cost import weight_macs


class PooledStem(PatchEmbed):
    """timm's patch embedding after a convolution and a maximum, which halve the image each."""

    def __init__(self, *, stem: int, in_chans: int = 3, embed_dim: int = 768, **kwargs: Any) -> None:
        super().__init__(in_chans=in_chans, embed_dim=embed_dim, **kwargs)
        if any(side % 4 for side in self.patch_size):
            raise UserError(f"patch_size={self.patch_size}: the stem halves the image twice, so 4 must divide patches")
        biased = self.proj.bias is not None
        del self.proj  # registered again below, after the stem, so that modules are listed in order of use
        self.conv = nn.Conv2d(in_chans, stem, 7, 2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(stem)
        quarter = (self.patch_size[0] // 4, self.patch_size[1] // 4)
        self.proj = nn.Conv2d(stem, embed_dim, quarter, quarter, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[-2], x.shape[-1])
        if self.strict_img_size and size != self.img_size:
            raise UserError(f"images of {size} were given to a model for {self.img_size}: resize them, or the model")
        if any(side % patch for side, patch in zip(size, self.patch_size, strict=True)):
            raise UserError(f"images of {size} do not divide into patches of {self.patch_size}")
        x = self.proj(F.max_pool2d(self.bn(self.conv(x)), 3, 2, padding=1))
        return self.norm(x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1))

    def macs(self, grid: Grid) -> int:
        """MACs of one image: the convolution at half the resolution, the projection on every patch."""
        pixels = grid.patches * 4 * self.proj.kernel_size[0] * self.proj.kernel_size[1]
        return pixels * self.conv.weight.numel() + grid.patches * self.proj.weight.numel()


class LocalMlp(nn.Module):
    """CeiT's locally enhanced MLP. Prefix tokens pass unchanged.

    Its 1 × 1 convolutions are linear layers here; PyTorch initialises both alike.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(dim, hidden), nn.BatchNorm1d(hidden)
        self.dwconv, self.bn2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden), nn.BatchNorm2d(hidden)
        self.fc2, self.bn3 = nn.Linear(hidden, dim), nn.BatchNorm1d(dim)

    def forward(self, x: Tensor, sides: list[int]) -> Tensor:
        """x [B, prefix + patches, C], the patches on a grid of these sides."""
        prefix = x.shape[1] - sides[0] * sides[1]
        y = F.gelu(self.bn1(self.fc1(x[:, prefix:]).mT)).unflatten(2, sides)
        y = F.gelu(self.bn2(self.dwconv(y))).flatten(2).mT
        return torch.cat([x[:, :prefix], self.bn3(self.fc2(y).mT).mT], dim=1)


class LocalBlock(ConvBlock):
    """A block with CeiT's MLP."""

    def mlp_macs(self, grid: Grid) -> int:
        return weight_macs(self.mlp, grid.patches)


class LayerAttention(nn.Module):
    """The last class token attends to those of all `layers`, [B, L, C] → [B, 1, C]; then an MLP."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, norm: Any, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.pos_embed = nn.Parameter(torch.zeros(1, layers, dim))
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
            trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.pos_embed
        x, y = tokens[:, -1:], self.norm1(tokens)
        q, k, v = (
            t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (self.q(y[:, -1:]), *self.kv(y).chunk(2, dim=-1))
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def macs(self, layers: int) -> int:
        once = sum(weight_macs(part, 1) for part in (self.q, self.proj, self.mlp))
        return once + weight_macs(self.kv, layers) + 2 * layers * self.q.in_features


class CeiT(ColumnarBackbone, VisionTransformer):
    """`stem` is the width of the stem's convolution."""

    def __init__(self, *args: Any, stem: int = 64, **kwargs: Any) -> None:
        super().__init__(*args, embed_layer=partial(PooledStem, stem=stem), **kwargs)
        if self.global_pool != "token" or self.num_prefix_tokens != 1:
            raise UserError("CeiT classifies its class token: expected global_pool='token' and no registers")
        self.stem = stem
        parts = ("norm1", "norm2", "ls1", "ls2", "drop_path1", "drop_path2", "reducer")
        for i, block in enumerate(self.blocks):
            kept = {name: getattr(block, name) for name in parts}
            local = LocalMlp(self.embed_dim, block.mlp.fc1.out_features)
            self.blocks[i] = LocalBlock(block.attn, mlp=local, **kept)
        final: Any = self.norm
        ratio = self.blocks[0].mlp.fc1.out_features / self.embed_dim
        heads, layers = self.blocks[0].attn.num_heads, len(self.blocks)
        self.layer_attention = LayerAttention(self.embed_dim, heads, ratio, _like(final), layers)
        trunc_normal_(self.cls_token, std=0.02)
        self.check_order()  # again, because this MLP requires every patch

    def run_layer(self, number: int, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        x, context = super().run_layer(number, x, context)
        trail = (*context.trail, x[:, :1])
        if number < len(self.blocks) - 1:
            return x, context.replace(trail=trail)
        return torch.cat([self.layer_attention(torch.cat(trail, dim=1)), x[:, 1:]], dim=1), context.replace(trail=())

    def embedding_macs(self, grid: Grid) -> int:
        return self.patch_embed.macs(grid)

    def head_macs(self, grid: Grid) -> int:
        return super().head_macs(grid) + self.layer_attention.macs(len(self.blocks))


def _like(norm: Any) -> Any:
    return lambda dim: type(norm)(dim, eps=norm.eps)
