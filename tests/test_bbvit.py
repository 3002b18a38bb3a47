"""BBViT's models against a reference written in loops from the paper and from what its code does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import attendless
from attendless.attention import Grid
from attendless.backbones import BBViT
from attendless_lab.papers.bbvit import PATTERNS, by_keys, by_queries, pairs

#: 7 × 7 patches and the class token: 25 blocks of two tokens.
SMALL: dict[str, Any] = {"img_size": 28, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
TOKENS, BLOCK = 50, 2


def made(attention: str, name: str = "bbvit_tiny", **changes: Any) -> Any:
    return timm.create_model(name, attention=attention, **SMALL, **changes).double().eval()


def sees(letters: str, query: int, key: int) -> bool:
    """Whether a query sees a key by the window and the global blocks; the class token sees and is seen by all."""
    a, b, last = query // BLOCK, key // BLOCK, TOKENS // BLOCK - 1
    if query == 0 or key == 0 or letters == "full":
        return True
    return ("W" in letters and abs(a - b) <= 1) or ("G" in letters and bool({a, b} & {0, last}))


def answers(gate: str, query: int) -> bool:
    """Whether a query's block answers at all under the released code's switches."""
    block, last = query // BLOCK, TOKENS // BLOCK - 1
    return {0: "R", last: "G"}.get(block, "W") in gate


def reference(model: Any, images: Tensor, letters: str, gate: str = "RWG") -> Tensor:
    """The model, one query at a time, from its weights alone."""
    w = dict(model.named_parameters())

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    patches = [
        images[:, :, i : i + 4, j : j + 4].flatten(1) @ w["patch_embed.proj.weight"].flatten(1).T
        for i in range(0, 28, 4)
        for j in range(0, 28, 4)
    ]
    x = torch.stack(patches, 1) + w["patch_embed.proj.bias"]
    x = torch.cat([w["cls_token"].expand(len(images), -1, -1), x], 1) + w["pos_embed"]
    for layer in range(2):
        name = f"blocks.{layer}"
        q, k, v = linear(norm(x, f"{name}.norm1"), f"{name}.attn.qkv").split(16, dim=-1)
        out = torch.zeros_like(x)
        for image in range(len(images)):
            for head in (slice(0, 8), slice(8, 16)):
                for query in range(TOKENS):
                    keys = [key for key in range(TOKENS) if sees(letters, query, key)]
                    if answers(gate, query):
                        scores = torch.stack([q[image, query, head] @ k[image, key, head] for key in keys])
                        weights = (scores / math.sqrt(8)).softmax(0)
                        out[image, query, head] = weights @ v[image, keys, head]
        x = x + (linear(out, f"{name}.attn.proj") if f"{name}.attn.proj.weight" in w else out)
        hidden = linear(norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"{name}.mlp.fc2")
    return linear(norm(x.mean(1), "fc_norm"), "head")


@pytest.mark.parametrize("letters", ["W", "G", "WG"])
def test_patterns_of_keys(letters: str) -> None:
    model, images = made(by_keys(letters, BLOCK)), torch.randn(2, 3, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(model(images), reference(model, images, letters))


@pytest.mark.parametrize("gate", ["R", "W", "G", "RW", "WG", "RG"])
def test_gates_of_queries(gate: str) -> None:
    """Without random blocks, which would have to be drawn alike."""
    model = made(f"{by_queries(gate, BLOCK)},random=0")
    images = torch.randn(1, 3, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(model(images), reference(model, images, "WG", gate))


def test_its_vit() -> None:
    model, images = made("full", "bbvit_vit_tiny"), torch.randn(2, 3, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(model(images), reference(model, images, "full"))
    assert model.blocks[0].attn.qkv.bias is None
    assert isinstance(model.blocks[0].attn.proj, nn.Linear)


@pytest.mark.parametrize(("name", "attention"), [("bbvit_tiny", "WG"), ("bbvit_vit_tiny", "full")])
def test_dropout_in_training(name: str, attention: str) -> None:
    """BBViT's attention drops nothing; its ViT drops weights and outputs. Both drop embeddings and twice in the MLP."""
    sparse = attention != "full"
    model = made(by_keys(attention, BLOCK) if sparse else "full", name).train()
    w, images = dict(model.named_parameters()), torch.randn(2, 3, 28, 28, dtype=torch.float64)

    def linear(x: Tensor, part: str) -> Tensor:
        return F.linear(x, w[f"{part}.weight"], w.get(f"{part}.bias"))

    def norm(x: Tensor, part: str) -> Tensor:
        return F.layer_norm(x, (16,), w[f"{part}.weight"], w[f"{part}.bias"])

    allowed = torch.tensor([[sees(attention, i, j) for j in range(TOKENS)] for i in range(TOKENS)])
    torch.manual_seed(3)
    x = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], 4).flatten(2).mT
    x = F.dropout(torch.cat([w["cls_token"].expand(2, -1, -1), x], 1) + w["pos_embed"], 0.1)
    for layer in ("blocks.0", "blocks.1"):
        q, k, v = linear(norm(x, f"{layer}.norm1"), f"{layer}.attn.qkv").view(2, TOKENS, 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(8)).masked_fill(~allowed, -math.inf).softmax(-1)
        out = (weights if sparse else F.dropout(weights, 0.1)) @ v
        out = out.transpose(1, 2).flatten(2)
        x = x + (out if sparse else F.dropout(linear(out, f"{layer}.attn.proj"), 0.1))
        hidden = F.dropout(F.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.mlp.fc1")), 0.1)
        x = x + F.dropout(linear(hidden, f"{layer}.mlp.fc2"), 0.1)
    expected = linear(norm(x.mean(1), "fc_norm"), "head")
    torch.manual_seed(3)
    found = model(images)
    torch.testing.assert_close(found, expected)
    weight, parameters = torch.randn_like(expected), list(w.values())
    for ours, theirs in zip(
        *(torch.autograd.grad((answer * weight).sum(), parameters) for answer in (found, expected)), strict=True
    ):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_a_saved_model_keeps_its_dropout(tmp_path: Path) -> None:
    model = made(by_keys("WG", BLOCK))
    attendless.save(model, tmp_path / "model.safetensors")
    block = attendless.load(tmp_path / "model.safetensors").blocks[0]
    assert (block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p) == (0, 0.1, 0.1)


@pytest.mark.parametrize(
    ("name", "dim", "depth", "patch", "bare"),
    [
        ("bbvit_tiny", 512, 3, 8, True),
        ("bbvit_vit_tiny", 512, 3, 8, False),
        ("bbvit_moderate", 1024, 6, 16, True),
        ("bbvit_vit_moderate", 1024, 6, 16, False),
    ],
)
def test_parameters_by_hand(name: str, dim: int, depth: int, patch: int, bare: bool) -> None:
    with torch.device("meta"):
        model: Any = timm.create_model(name)
    attention = 3 * (dim**2 + dim) if bare else 3 * dim**2 + dim**2 + dim
    layer = attention + 2 * 2 * dim**2 + 3 * dim + 4 * dim
    around = 3 * patch**2 * dim + dim + dim + 530 * dim + 2 * dim + 10 * (dim + 1)
    assert sum(p.numel() for p in model.parameters()) == depth * layer + around
    assert model.grid() == Grid(23, 23, 1)
    assert (model.num_classes, model.blocks[0].attn.head_dim, model.pos_drop.p) == (10, 64, 0.1)


@pytest.mark.parametrize("out_proj", [True, False])
def test_counts_are_what_is_executed(out_proj: bool) -> None:
    model: Any = timm.create_model("bbvit_w64_patch6_72", attention="full", out_proj=out_proj).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 72, 72))
    assert counter.get_total_flops() == 2 * sum(layer.macs.total for layer in model.costs())


def test_a_model_without_output_projection_can_be_saved_and_converted(tmp_path: Path) -> None:
    model = timm.create_model("bbvit_tiny", **SMALL).eval()
    attendless.save(model, tmp_path / "model.safetensors")
    loaded: Any = attendless.load(tmp_path / "model.safetensors")
    images = torch.randn(1, 3, 28, 28)
    torch.testing.assert_close(loaded(images), model(images))
    assert isinstance(loaded, BBViT)
    converted: Any = attendless.convert(model, "full", below_breakeven="keep")
    assert not any("attn.proj" in name for name, _ in converted.named_parameters())


def test_weights_start_as_the_released_code_draws_them() -> None:
    model: Any = timm.create_model("bbvit_tiny")
    assert 0.98 < float(model.pos_embed.detach().std()) < 1.02
    bound = 512**-0.5  # PyTorch's linear layers: uniform up to 1 / √inputs
    weight = model.blocks[0].mlp.fc1.weight.detach()
    assert 0.99 * bound < float(weight.abs().max()) <= bound
    assert float(model.blocks[0].mlp.fc1.bias.detach().abs().max()) > 0


def test_pairs_of_the_paper() -> None:
    """51,200 of 280,900 pairs, as BigBird's own mask has it for 530 tokens; the gates keep whole rows of it."""
    grid = Grid(23, 23, 1)
    assert pairs("bigbird:form=1d", grid, 8) == pytest.approx(100 * 51200 / 280900)
    gated = {letters: pairs(by_queries(letters), grid, 8) for letters, _ in PATTERNS.values() if letters}
    assert gated["R"] == gated["G"] == pytest.approx(100 * 10 * 530 / 530**2)
    assert gated["R"] + gated["W"] + gated["G"] == pytest.approx(gated["RWG"])


def test_training_moves_every_weight() -> None:
    model = timm.create_model("bbvit_tiny", **SMALL).train()
    F.cross_entropy(model(torch.randn(4, 3, 28, 28)), torch.tensor([0, 1, 2, 3])).backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "qkv.bias" not in n
    )
