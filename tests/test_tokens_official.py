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


# DynamicViT ----------------------------------------------------------------------------------------------------------


def dynamicvit_odds(weights: dict[str, Tensor], name: str, patches: Tensor, before: Tensor) -> Tensor:
    z = F.gelu(linear(weights, f"{name}.in_conv.1", norm(weights, f"{name}.in_conv.0", patches, 1e-5)))
    local, whole = z.chunk(2, dim=-1)
    mean = (whole * before[..., None]).sum(1, keepdim=True) / before[..., None].sum(1, keepdim=True)
    z = torch.cat([local, mean.expand_as(local)], dim=-1)
    for part in (0, 2):
        z = F.gelu(linear(weights, f"{name}.out_conv.{part}", z))
    return linear(weights, f"{name}.out_conv.4", z).log_softmax(-1)


def dynamicvit_reference(model: Columnar, images: Tensor, at: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Training: the class token's answer, and the policy after each predictor."""
    weights = dict(model.named_parameters())
    x = model.embed(images)[0]
    N = x.shape[1]
    policy, policies = torch.ones(x.shape[:2], dtype=x.dtype), []
    for i in range(len(model.blocks)):
        block = f"blocks.{i}"
        if i in at:
            odds = dynamicvit_odds(weights, f"{block}.reducer", x[:, 1:], policy[:, 1:])
            kept = F.gumbel_softmax(odds, hard=True)[..., 0] * policy[:, 1:]
            policy = torch.cat([torch.ones_like(kept[:, :1]), kept], dim=1)
            policies.append(kept)
        q, k, v = heads(weights, f"{block}.attn", norm(weights, f"{block}.norm1", x), 2)
        scores = q @ k.mT
        seen = policy[:, None, None] + (1 - policy[:, None, None]) * torch.eye(N, dtype=x.dtype)
        found = (scores - scores.max(-1, keepdim=True)[0]).exp() * (seen if at[0] <= i else torch.ones_like(seen))
        attention = (found + 1e-6 / N) / (found.sum(-1, keepdim=True) + 1e-6) if at[0] <= i else scores.softmax(-1)
        x = mlp(weights, block, x + linear(weights, f"{block}.attn.proj", (attention @ v).transpose(1, 2).flatten(2)))
    return linear(weights, "head", norm(weights, "norm", x)[:, 0]), policies


def test_dynamicvit_in_training_with_gradients() -> None:
    """Outputs, the ratio loss and every gradient in fp64; patches that the draw drops have a gradient too."""
    model = column("dynamicvit:keep=0.6,at=1/2,ratio=2").double().train()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.manual_seed(4)
    expected, policies = dynamicvit_reference(model, images, [1, 2])
    assert 0 < policies[1].sum() < policies[0].sum() < policies[0].numel()
    ratio = sum((policy.mean(1) - 0.6**s).square().mean() for s, policy in enumerate(policies, 1))
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum() + 2 * ratio / 2, list(model.parameters()))
    torch.manual_seed(4)
    x, context = model.forward_context(images)
    found = model.forward_head(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    loss = (found * weight).sum() + context.extra()["ratio"]
    for (name, _), ours, theirs in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True
    ):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm(), name
        assert theirs.norm() > 0, name


@pytest.mark.parametrize("attention", ["foveal:keep=0.5", "efficient"])
def test_masked_patches_have_a_gradient_under_other_attentions(attention: str) -> None:
    model = column("dynamicvit:keep=0.5,at=1", attention=attention).train()
    x, context = model.forward_context(torch.randn(2, 3, 32, 32))
    sizes = context.grid.sizes
    assert sizes is not None
    (gradient,) = torch.autograd.grad(model.forward_head(x).square().sum(), sizes)
    assert (gradient[sizes == 0].abs() > 0).all()


def test_dynamicvit_at_test_keeps_the_patches_its_authors_keep() -> None:
    model = column("dynamicvit:keep=0.6,at=1/2")
    weights, images = dict(model.named_parameters()), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        x = model.embed(images)[0]
        for i in range(4):
            block = f"blocks.{i}"
            if i in (1, 2):
                ones = torch.ones(2, x.shape[1] - 1)
                score = dynamicvit_odds(weights, f"{block}.reducer", x[:, 1:], ones)[..., 0]
                kept = score.argsort(dim=1, descending=True)[:, : int(64 * 0.6**i)] + 1
                index = torch.cat([torch.zeros(2, 1, dtype=torch.long), kept], dim=1)
                x = x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
            q, k, v = heads(weights, f"{block}.attn", norm(weights, f"{block}.norm1", x), 2)
            out = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = mlp(weights, block, x + linear(weights, f"{block}.attn.proj", out))
        expected = linear(weights, "head", norm(weights, "norm", x)[:, 0])
        torch.testing.assert_close(model(images), expected, atol=3e-5, rtol=0)


# EViT ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
def test_evit_in_training_with_gradients(fuse: bool) -> None:
    model = column(f"evit:keep=0.5,at=1/2,fuse={str(fuse).lower()}").double().train()
    weights, images = dict(model.named_parameters()), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    x = model.embed(images)[0]
    for i in range(4):
        block = f"blocks.{i}"
        q, k, v = heads(weights, f"{block}.attn", norm(weights, f"{block}.norm1", x), 2)
        attention = (q @ k.mT).softmax(-1)
        x = x + linear(weights, f"{block}.attn.proj", (attention @ v).transpose(1, 2).flatten(2))
        if i in (1, 2):
            score, patches = attention[:, :, 0, 1:].mean(1), x[:, 1:]
            order = score.argsort(dim=1, descending=True)
            staying = -(-patches.shape[1] // 2)
            kept, gone = (part[..., None].expand(-1, -1, 32) for part in (order[:, :staying], order[:, staying:]))
            fused = (patches * score[..., None]).gather(1, gone).sum(1, keepdim=True)
            x = torch.cat([x[:, :1], patches.gather(1, kept), *([fused] if fuse else [])], dim=1)
        x = mlp(weights, block, x)
    expected = linear(weights, "head", norm(weights, "norm", x)[:, 0])
    found = model(images)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weight, parameters = torch.randn_like(expected), list(model.parameters())
    for ours, theirs in zip(
        *(torch.autograd.grad((answer * weight).sum(), parameters) for answer in (found, expected)), strict=True
    ):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
