"""Token reducers against slow references written from the equations of their authors' code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attendless.backbones import Columnar

SMALL = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}


def column(tokens: str, **changes: object) -> Columnar:
    torch.manual_seed(0)
    model = Columnar(**{**SMALL, **changes}, tokens=tokens).eval()
    for parameter in model.parameters():  # so that attention differs between patches
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def norm(weights: dict[str, Tensor], name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def heads(weights: dict[str, Tensor], name: str, x: Tensor, H: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (scaled), keys and values of normed tokens x [B, N, C], each [B, H, N, D]."""
    B, N, C = x.shape
    q, k, v = linear(weights, f"{name}.qkv", x).view(B, N, 3, H, C // H).permute(2, 0, 3, 1, 4)
    return q * (C // H) ** -0.5, k, v


def mlp(weights: dict[str, Tensor], block: str, x: Tensor) -> Tensor:
    hidden = F.gelu(linear(weights, f"{block}.mlp.fc1", norm(weights, f"{block}.norm2", x)))
    return x + linear(weights, f"{block}.mlp.fc2", hidden)


# ToMe ----------------------------------------------------------------------------------------------------------------


def tome_merge(keys: Tensor, r: int, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """One image: keys [N, D], tokens x [N, C], sizes [N]; token 0 is the class token and stays."""
    unit = keys / keys.norm(dim=-1, keepdim=True)
    a, b = list(range(0, len(x), 2)), list(range(1, len(x), 2))
    likeness = unit[a] @ unit[b].T
    likeness[0] = -torch.inf
    best, partner = likeness.max(-1)
    goes = set(best.argsort(descending=True)[:r].tolist())
    total, count = x * sizes[:, None], sizes.clone()
    for i in goes:
        total[b[partner[i]]] += x[a[i]] * sizes[a[i]]
        count[b[partner[i]]] += sizes[a[i]]
    left = [a[i] for i in range(len(a)) if i not in goes] + b
    return total[left] / count[left, None], count[left]


def tome_reference(model: Columnar, images: Tensor, rs: list[int], prop_attn: bool) -> Tensor:
    weights = dict(model.named_parameters())
    x = model.embed(images)[0]
    sizes = torch.ones(x.shape[:2])
    for i, r in enumerate(rs):
        block = f"blocks.{i}"
        q, k, v = heads(weights, f"{block}.attn", norm(weights, f"{block}.norm1", x), 2)
        scores = q @ k.mT + (sizes.log()[:, None, None] if prop_attn else 0)
        x = x + linear(weights, f"{block}.attn.proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        pairs = [tome_merge(*given) for given in zip(k.mean(1), [r] * len(x), x, sizes, strict=True)]
        x, sizes = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
        x = mlp(weights, block, x)
    if model.global_pool == "avg":  # MAE: pooled by size, then normed
        pooled = (x * sizes[..., None])[:, 1:].sum(1) / 64
        return linear(weights, "head", norm(weights, "fc_norm", pooled))
    return linear(weights, "head", norm(weights, "norm", x)[:, 0])


@pytest.mark.parametrize("prop_attn", [True, False])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_tome_with_and_without_proportional_attention(prop_attn: bool, pool: str) -> None:
    model = column(f"tome:r=3/7,prop_attn={str(prop_attn).lower()}", global_pool=pool)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = tome_reference(model, images, [3, 4, 5, 7], prop_attn)
        torch.testing.assert_close(model(images), expected, atol=3e-5, rtol=0)
        other = tome_reference(model, images, [3, 4, 5, 7], not prop_attn)
    assert (other - expected).abs().max() > 1e-3, "the option matters here"


@pytest.mark.parametrize("attention", ["foveal:keep=0.3", "efficient", "sparsifiner:keep=0.5"])
def test_other_attentions_also_weight_a_merged_token_like_any_other(attention: str) -> None:
    model = column("tome:r=6,prop_attn=false", attention=attention)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        grid = model.forward_context(images)[1].grid
        assert grid.key_bias(torch.float32) is None
        assert grid.sizes is not None
        plain = model(images)
        model.set_tokens("tome:r=6")
        assert (model(images) - plain).abs().max() > 1e-4
