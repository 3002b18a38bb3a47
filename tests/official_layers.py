"""Random weights with the names and shapes of authors' code, and slow layers that compute with them as it does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES = 5
PVT_DIMS, PVT_HEADS = (8, 16, 40, 64), (1, 2, 5, 8)


class Weights(dict[str, Tensor]):
    """Random weights by name, near what training leaves: `norm` and `batch_norm` are near the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(0)

    def draw(self, name: str, *shape: int, std: float = 0.2, mean: float = 0.0) -> None:
        self[name] = mean + std * torch.randn(*shape, generator=self.draws)

    def linear(self, name: str, out: int, into: int, bias: bool = True) -> None:
        self.draw(f"{name}.weight", out, into, std=into**-0.5)
        if bias:
            self.draw(f"{name}.bias", out)

    def conv(self, name: str, out: int, into: int, kernel: int, bias: bool = True) -> None:
        self.draw(f"{name}.weight", out, into, kernel, kernel, std=(into * kernel**2) ** -0.5)
        if bias:
            self.draw(f"{name}.bias", out)

    def norm(self, name: str, width: int) -> None:
        self.draw(f"{name}.weight", width, mean=1)
        self.draw(f"{name}.bias", width)

    def batch_norm(self, name: str, width: int) -> None:
        self.norm(name, width)
        self.draw(f"{name}.running_mean", width)
        self[f"{name}.running_var"] = 0.5 + torch.rand(width, generator=self.draws)
        self[f"{name}.num_batches_tracked"] = torch.tensor(3)

    def block(self, name: str, dim: int, hidden: int, qkv_bias: bool = True) -> None:
        self.norm(f"{name}.norm1", dim)
        self.linear(f"{name}.attn.qkv", 3 * dim, dim, qkv_bias)
        self.linear(f"{name}.attn.proj", dim, dim)
        self.norm(f"{name}.norm2", dim)
        self.linear(f"{name}.mlp.fc1", hidden, dim)
        self.linear(f"{name}.mlp.fc2", dim, hidden)

    def tokens(self, dim: int, patches: int, cls: bool = True) -> None:
        if cls:
            self.draw("cls_token", 1, 1, dim)
        self.draw("pos_embed", 1, patches + int(cls), dim)

    def answer(self, dim: int) -> None:
        self.norm("norm", dim)
        self.linear("head", CLASSES, dim)

    # What is computed with them ---------------------------------------------------------------------------------------

    def lin(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def ln(self, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"], eps)

    def bn(self, name: str, x: Tensor, training: bool = False) -> Tensor:
        mean, var = self[f"{name}.running_mean"].clone(), self[f"{name}.running_var"].clone()
        return F.batch_norm(x, mean, var, self[f"{name}.weight"], self[f"{name}.bias"], training)

    def convolved(self, name: str, x: Tensor, stride: int = 1, padding: int = 0, groups: int = 1) -> Tensor:
        return F.conv2d(x, self[f"{name}.weight"], self.get(f"{name}.bias"), stride, padding, groups=groups)

    def attention(self, name: str, x: Tensor, heads: int) -> Tensor:
        q, k, v = self.lin(f"{name}.qkv", x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.lin(f"{name}.proj", (weights @ v).transpose(1, 2).flatten(2))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.lin(f"{name}.fc2", F.gelu(self.lin(f"{name}.fc1", x)))

    def embedded(self, patches: Tensor) -> Tensor:
        """Patches [B, C, h, w] → tokens with the class token and positions."""
        x = patches.flatten(2).mT
        if "cls_token" in self:
            x = torch.cat([self["cls_token"].expand(len(x), -1, -1), x], dim=1)
        return x + self["pos_embed"]


def pvt_weights(dims: Sequence[int], side: int) -> Weights:
    w, into = Weights(), 3
    for s, dim in enumerate(dims, 1):
        w.conv(f"patch_embed{s}.proj", dim, into, 4 if s == 1 else 2)
        w.norm(f"patch_embed{s}.norm", dim)
        cells = (side >> (s + 1)) ** 2
        w.draw(f"pos_embed{s}", 1, cells + int(s == 4), dim)
        for j in range(2):
            name = f"block{s}.{j}"
            w.block(name, dim, (8, 8, 4, 4)[s - 1] * dim)
            for part in ("weight", "bias"):
                fused = w.pop(f"{name}.attn.qkv.{part}")
                w[f"{name}.attn.q.{part}"], w[f"{name}.attn.kv.{part}"] = fused[:dim], fused[dim:]
            if s < 4:
                w.conv(f"{name}.attn.sr", dim, dim, 16 >> s)
                w.norm(f"{name}.attn.norm", dim)
        into = dim
    w.draw("cls_token", 1, 1, dims[-1])
    w.answer(dims[-1])
    return w


def pvt_stage(w: Weights, s: int, x: Tensor, positions: Tensor, heads: int, cls: Tensor | None = None) -> Tensor:
    """A stage of PVT on a map [B, C, h, w]: its map, or with `cls` its tokens."""
    x = w.convolved(f"patch_embed{s}.proj", x, 4 if s == 1 else 2)
    sides = x.shape[2:]
    x = w.ln(f"patch_embed{s}.norm", x.flatten(2).mT, 1e-5)
    if cls is not None:
        x = torch.cat([cls.expand(len(x), -1, -1), x], dim=1)
    x = x + positions
    for j in range(2):
        name = f"block{s}.{j}"
        y = z = w.ln(f"{name}.norm1", x)
        if s < 4:
            z = w.convolved(f"{name}.attn.sr", y.mT.unflatten(2, sides), 16 >> s).flatten(2).mT
            z = w.ln(f"{name}.attn.norm", z, 1e-5)
        q = w.lin(f"{name}.attn.q", y).unflatten(2, (heads, -1)).transpose(1, 2)
        k, v = w.lin(f"{name}.attn.kv", z).unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        out = ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + w.lin(f"{name}.attn.proj", out)
        x = x + w.mlp(f"{name}.mlp", w.ln(f"{name}.norm2", x))
    return x if cls is not None else x.mT.unflatten(2, sides)
