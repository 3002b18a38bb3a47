"""State dicts of the authors' code, with random weights of their names and shapes, load strictly and compute what a
slow reference computes from the same weights: CeiT, DeepViT, HVT, LV-ViT, PVT, DynamicViT, EViT."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from attendless.errors import UserError
from attendless.integrations.weights import load_weights
from official_layers import CLASSES, PVT_DIMS, PVT_HEADS, Weights, pvt_stage, pvt_weights


def model_of(name: str, weights: dict[str, Tensor], **given: Any) -> Any:
    torch.manual_seed(7)
    model = timm.create_model(name, num_classes=CLASSES, img_size=64, **given)
    load_weights(model, dict(weights))
    wrong = {**weights, "surplus.weight": torch.zeros(1)}
    with pytest.raises(UserError, match=r"surplus.weight is unexpected"):
        load_weights(model, wrong)
    return model.eval()


def agree(model: Any, expected: Tensor, images: Tensor) -> None:
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(model(images), expected, atol=3e-5, rtol=0)


IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def ceit_weights(dim: int, layers: int) -> Weights:
    w = Weights()
    w.tokens(dim, 16)
    w.draw("pos_layer_embed", 1, layers, dim)
    w.conv("i2t.backbone.conv", 64, 3, 7, bias=False)
    w.batch_norm("i2t.backbone.bn", 64)
    w.conv("i2t.proj", dim, 64, 4)
    for i in range(layers):
        for norm in ("norm2", "norm1"):
            w.norm(f"blocks.{i}.{norm}", dim)
        w.linear(f"blocks.{i}.attn.qkv", 3 * dim, dim)
        w.linear(f"blocks.{i}.attn.proj", dim, dim)
        for part, out, into, kernel in ((1, 4 * dim, dim, 1), (2, 4 * dim, 1, 3), (3, dim, 4 * dim, 1)):
            w.conv(f"blocks.{i}.leff.conv{part}", out, into, kernel)
            w.batch_norm(f"blocks.{i}.leff.bn{part}", out)
    w.block("lca", dim, 4 * dim)
    for name in [name for name in w if name.startswith("lca.mlp.")]:
        w[name.replace("mlp", "feedforward")] = w.pop(name)
    w.answer(dim)
    return w


def ceit(w: Weights, images: Tensor, heads: int, layers: int, training: bool = False) -> Tensor:
    x = w.bn("i2t.backbone.bn", w.convolved("i2t.backbone.conv", images, 2, 3), training)
    x = w.embedded(w.convolved("i2t.proj", F.max_pool2d(x, 3, 2, 1), 4))
    side, classes = int((x.shape[1] - 1) ** 0.5), []
    for i in range(layers):
        name = f"blocks.{i}"
        x = x + w.attention(f"{name}.attn", w.ln(f"{name}.norm1", x), heads)
        y = w.ln(f"{name}.norm2", x)
        z = y[:, 1:].mT.unflatten(2, (side, side))
        for part, padding in ((1, 0), (2, 1), (3, 0)):
            z = w.convolved(f"{name}.leff.conv{part}", z, 1, padding, z.shape[1] if part == 2 else 1)
            z = w.bn(f"{name}.leff.bn{part}", z, training)
            z = F.gelu(z) if part < 3 else z
        x = x + torch.cat([y[:, :1], z.flatten(2).mT], dim=1)
        classes.append(x[:, 0])
    tokens = torch.stack(classes, dim=1) + w["pos_layer_embed"]
    y = tokens[:, -1:] + w.attention("lca.attn", w.ln("lca.norm1", tokens), heads)[:, -1:]
    y = y + w.mlp("lca.feedforward", w.ln("lca.norm2", y))
    return w.lin("head", w.ln("norm", y)[:, 0])


@torch.no_grad()
def test_ceit() -> None:
    w = ceit_weights(48, 3)
    model = model_of("columnar_ceit_tiny", w, embed_dim=48, depth=3)
    agree(model, ceit(w, IMAGES, 3, 3), IMAGES)
    assert model.layer_attention.pos_embed.numel() == 3 * 48


def test_ceit_trains_like_its_authors_code() -> None:
    w = ceit_weights(48, 2)
    model = model_of("columnar_ceit_tiny", w, embed_dim=48, depth=2).double().train()
    twin = ceit_weights(48, 2)
    for name, value in w.items():
        twin[name] = value.double().requires_grad_() if "running" not in name and "num" not in name else value.double()
    images = IMAGES.double()
    expected, found = ceit(twin, images, 3, 2, training=True), model(images)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(expected)
    pairs = {
        "pos_layer_embed": model.layer_attention.pos_embed,
        "blocks.0.leff.conv1.weight": model.blocks[0].mlp.fc1.weight,
        "blocks.1.leff.conv2.weight": model.blocks[1].mlp.dwconv.weight,
        "blocks.0.norm2.weight": model.blocks[0].norm2.weight,
        "cls_token": model.cls_token,
    }
    theirs = torch.autograd.grad((expected * weight).sum(), [twin[name] for name in pairs])
    ours = torch.autograd.grad((found * weight).sum(), list(pairs.values()))
    for name, a, b in zip(pairs, ours, theirs, strict=True):
        assert (a.flatten() - b.flatten()).norm() <= 1e-6 * b.norm(), name


@torch.no_grad()
def test_ceit_starts_like_its_authors_code() -> None:
    torch.manual_seed(0)
    model = timm.create_model("columnar_ceit_tiny", img_size=64, depth=2)
    mlp, last = model.blocks[0].mlp, model.layer_attention
    for layer, inputs in ((mlp.fc1, 192), (mlp.fc2, 768), (mlp.dwconv, 9)):
        bound = inputs**-0.5  # PyTorch's default: even in ±1/√inputs
        for value in (layer.weight, layer.bias):
            assert value.abs().max() <= bound
            assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert last.pos_embed.abs().max() == 0
    for value in (last.kv.weight, model.blocks[0].attn.qkv.weight, model.cls_token):
        assert value.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_deepvit(training: bool) -> None:
    dim, heads, layers = 36, 12, 16
    w = Weights()
    w.tokens(dim, 16)
    for part, into, kernel in ((1, 3, 7), (2, 64, 3)):
        w.conv(f"patch_embed.conv{part}", 64, into, kernel, bias=False)
        w.batch_norm(f"patch_embed.bn{part}", 64)
    w.conv("patch_embed.proj", dim, 64, 8)
    for i in range(layers):
        w.block(f"blocks.{i}", dim, 3 * dim)
        if i >= 11:
            w.conv(f"blocks.{i}.attn.reatten_matrix", heads, heads, 1)
            w.batch_norm(f"blocks.{i}.attn.var_norm", heads)
    w.answer(dim)
    for name in ("pos_embed", "cls_token"):
        w[name] *= 1e-2  # so that the epsilon of the norms matters
    x = F.relu(w.bn("patch_embed.bn1", w.convolved("patch_embed.conv1", IMAGES, 2, 3), training))
    x = F.relu(w.bn("patch_embed.bn2", w.convolved("patch_embed.conv2", x, 1, 1), training))
    x = w.embedded(w.convolved("patch_embed.proj", x, 8))
    for i in range(layers):
        name = f"blocks.{i}"
        y = w.ln(f"{name}.norm1", x * 0.5)
        q, k, v = w.lin(f"{name}.attn.qkv", y).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        maps = (q @ k.mT * 3**-0.5).softmax(-1)
        if i >= 11:
            mixed = w.convolved(f"{name}.attn.reatten_matrix", maps)
            maps = w.bn(f"{name}.attn.var_norm", mixed, training) * 3**-0.5
        x = x + w.lin(f"{name}.attn.proj", (maps @ v).transpose(1, 2).flatten(2)) / 0.5
        x = x + w.mlp(f"{name}.mlp", w.ln(f"{name}.norm2", x * 0.5)) / 0.5
    expected = w.lin("head", w.ln("norm", x)[:, 0])
    agree(model_of("columnar_deepvit_small", w, embed_dim=dim).train(training), expected, IMAGES)


@torch.no_grad()
def test_lvvit() -> None:
    dim, heads, layers = 48, 6, 3
    w = Weights()
    w.tokens(dim, 16)
    for part, into, kernel in ((1, 3, 7), (2, 64, 3), (3, 64, 3)):
        w.conv(f"patch_embed.conv{part}", 64, into, kernel, bias=False)
        w.batch_norm(f"patch_embed.bn{part}", 64)
    w.conv("patch_embed.proj", dim, 64, 8)
    for i in range(layers):
        w.block(f"blocks.{i}", dim, 3 * dim, qkv_bias=False)
    w.answer(dim)
    w.linear("aux_head", CLASSES, dim)
    x = IMAGES
    for part, stride, padding in ((1, 2, 3), (2, 1, 1), (3, 1, 1)):
        x = F.relu(w.bn(f"patch_embed.bn{part}", w.convolved(f"patch_embed.conv{part}", x, stride, padding)))
    x = w.embedded(w.convolved("patch_embed.proj", x, 8))
    for i in range(layers):
        name = f"blocks.{i}"
        x = x + w.attention(f"{name}.attn", w.ln(f"{name}.norm1", x, 1e-5), heads) / 2
        x = x + w.mlp(f"{name}.mlp", w.ln(f"{name}.norm2", x, 1e-5)) / 2
    x = w.ln("norm", x, 1e-5)
    model = model_of("columnar_lvvit_small", w, embed_dim=dim, depth=layers)
    agree(model, w.lin("head", x[:, 0]) + 0.5 * w.lin("aux_head", x[:, 1:]).amax(1), IMAGES)


@torch.no_grad()
def test_hvt() -> None:
    dim, heads = 48, 6
    w = Weights()
    images = torch.randn(2, 3, 96, 96)
    w.tokens(dim, 36, cls=False)
    w.conv("patch_embed.proj", dim, 3, 16)
    left = 36
    for i in range(12):
        w.block(f"blocks.{i}", dim, 4 * dim)
        if i % 3 == 0:
            left = (left - 3) // 2 + 1
            w.draw(f"blocks.{i}.pos_embed", 1, left, dim)
    w.answer(dim)
    x = w.embedded(w.convolved("patch_embed.proj", images, 16))
    for i in range(12):
        name = f"blocks.{i}"
        x = x + w.attention(f"{name}.attn", w.ln(f"{name}.norm1", x), heads)
        x = x + w.mlp(f"{name}.mlp", w.ln(f"{name}.norm2", x))
        if i % 3 == 0:
            x = F.max_pool1d(x.mT, 3, 2).mT + w[f"{name}.pos_embed"]
    expected = w.lin("head", w.ln("norm", x).mean(1))
    model = timm.create_model("columnar_hvt_tiny", num_classes=CLASSES, img_size=96, embed_dims=(dim,) * 5)
    load_weights(model, dict(w))
    agree(model.eval(), expected, images)


@torch.no_grad()
def test_pvt() -> None:
    w, x = pvt_weights(PVT_DIMS, 64), IMAGES
    for s in (1, 2, 3):
        x = pvt_stage(w, s, x, w[f"pos_embed{s}"], PVT_HEADS[s - 1])
    x = pvt_stage(w, 4, x, w["pos_embed4"], 8, w["cls_token"])
    expected = w.lin("head", w.ln("norm", x)[:, 0])
    agree(model_of("pyramid_pvt_tiny", w, embed_dims=PVT_DIMS), expected, IMAGES)


def vit_weights(dim: int, layers: int) -> Weights:
    w = Weights()
    w.tokens(dim, 16)
    w.conv("patch_embed.proj", dim, 3, 16)
    for i in range(layers):
        w.block(f"blocks.{i}", dim, 4 * dim)
    w.answer(dim)
    return w


@torch.no_grad()
def test_dynamicvit() -> None:
    """The names; `tests/test_tokens_official.py` compares what is computed."""
    w = vit_weights(48, 4)
    for s in range(2):
        name = f"score_predictor.{s}"
        w.norm(f"{name}.in_conv.0", 48)
        w.linear(f"{name}.in_conv.1", 48, 48)
        for part, out, into in ((0, 24, 48), (2, 12, 24), (4, 2, 12)):
            w.linear(f"{name}.out_conv.{part}", out, into)
    model = model_of("columnar_tiny_patch16_224", w, embed_dim=48, depth=4, tokens="dynamicvit:keep=0.6,at=1/3")
    for s, place in enumerate((1, 3)):
        for part, value in model.blocks[place].reducer.state_dict().items():
            assert torch.equal(value, w[f"score_predictor.{s}.{part}"]), part
    with pytest.raises(UserError, match=r"score_predictor.0.in_conv.0.weight is unexpected"):
        load_weights(timm.create_model("columnar_tiny_patch16_224", img_size=64, embed_dim=48, depth=4), dict(w))


@torch.no_grad()
def test_evit() -> None:
    w = vit_weights(48, 4)
    model = model_of("columnar_tiny_patch16_224", w, embed_dim=48, depth=4, tokens="evit:keep=0.5,at=1/2")
    assert torch.equal(model.blocks[2].attn.qkv.weight, w["blocks.2.attn.qkv.weight"])
    model.set_tokens("none")
    x = w.embedded(w.convolved("patch_embed.proj", IMAGES, 16))
    for i in range(4):
        x = x + w.attention(f"blocks.{i}.attn", w.ln(f"blocks.{i}.norm1", x), 3)
        x = x + w.mlp(f"blocks.{i}.mlp", w.ln(f"blocks.{i}.norm2", x))
    agree(model, w.lin("head", w.ln("norm", x)[:, 0]), IMAGES)
