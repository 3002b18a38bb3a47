"""LV-ViT: its equations, its authors' names, and that a backbone of this kind does all that the others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import attendless
from attendless import UserError
from attendless.backbones import LVViT
from attendless.integrations.weights import load_weights
from attendless.measure.macs import count, count_by_running
from attendless.measure.subject import original
from attendless_cli.main import main
from attendless_lab.papers import rules

SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 3}
SMALL |= {"stem": 6, "skip": 2.0, "qkv_bias": False, "num_classes": 5}
IMAGES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> LVViT:
    torch.manual_seed(0)
    model = LVViT(**{**SMALL, **changes}).eval()
    for value in model.state_dict().values():  # running means and variances too
        if value.is_floating_point():
            value.add_(0.1 * torch.rand_like(value))
    return model


def by_hand(w: dict[str, Tensor], images: Tensor, skip: float, heads: int) -> tuple[Tensor, Tensor]:
    """The answer of the class token and those of the patches, from the weights alone."""
    x = images
    for number in (1, 2, 3):
        x = F.conv2d(
            x, w[f"patch_embed.conv{number}.weight"], stride=2 if number == 1 else 1, padding=[0, 3, 1, 1][number]
        )
        bn = f"patch_embed.bn{number}"
        mean, var = (w[f"{bn}.running_{name}"][:, None, None] for name in ("mean", "var"))
        weight, bias = (w[f"{bn}.{name}"][:, None, None] for name in ("weight", "bias"))
        x = ((x - mean) / (var + 1e-5).sqrt() * weight + bias).clamp(min=0)
    kernel = w["patch_embed.proj.weight"]
    x = F.conv2d(x, kernel, w["patch_embed.proj.bias"], stride=kernel.shape[-1]).flatten(2).mT
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], dim=1) + w["pos_embed"]
    C, layer = x.shape[-1], 0
    norm = lambda x, name: F.layer_norm(x, (C,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)  # noqa: E731
    while f"blocks.{layer}.attn.qkv.weight" in w:
        b = f"blocks.{layer}"
        q, k, v = (norm(x, f"{b}.norm1") @ w[f"{b}.attn.qkv.weight"].mT).chunk(3, dim=-1)
        out = []
        for h in range(heads):
            part = slice(h * C // heads, (h + 1) * C // heads)
            out.append(torch.softmax(q[..., part] @ k[..., part].mT * (C // heads) ** -0.5, -1) @ v[..., part])
        x = x + (torch.cat(out, -1) @ w[f"{b}.attn.proj.weight"].mT + w[f"{b}.attn.proj.bias"]) / skip
        y = F.gelu(norm(x, f"{b}.norm2") @ w[f"{b}.mlp.fc1.weight"].mT + w[f"{b}.mlp.fc1.bias"])
        x = x + (y @ w[f"{b}.mlp.fc2.weight"].mT + w[f"{b}.mlp.fc2.bias"]) / skip
        layer += 1
    x = norm(x, "norm")
    return x[:, 0] @ w["head.weight"].mT + w["head.bias"], x[:, 1:] @ w["aux_head.weight"].mT + w["aux_head.bias"]


@pytest.mark.parametrize("skip", [1.0, 2.0])
@torch.no_grad()
def test_against_the_equations(skip: float) -> None:
    model = small(skip=skip, norm_layer=lambda dim, **more: torch.nn.LayerNorm(dim, eps=1e-5, **more))
    head, patches = by_hand(model.state_dict(), IMAGES, skip, 2)
    torch.testing.assert_close(model(IMAGES), head + 0.5 * patches.max(1).values, atol=1e-4, rtol=1e-4)
    features = model.forward_features(IMAGES)
    torch.testing.assert_close(model.patch_logits(features), patches, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.train().forward_head(features), head, atol=1e-4, rtol=1e-4)


def test_names_are_the_authors() -> None:
    names = set(small(depth=1).state_dict())
    pair = ("weight", "bias")
    expected = {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    for number in (1, 2, 3):
        norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        expected |= {f"patch_embed.conv{number}.weight", *(f"patch_embed.bn{number}.{name}" for name in norm)}
    layers = ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2")
    expected |= {"blocks.0.attn.qkv.weight", *(f"blocks.0.{layer}.{name}" for layer in layers for name in pair)}
    assert names == expected | {f"{layer}.{name}" for layer in ("norm", "head", "aux_head") for name in pair}


@pytest.mark.parametrize(("size", "millions"), [("tiny", 8.5), ("small", 26.2), ("medium", 55.8)])
def test_sizes_are_the_authors(size: str, millions: float) -> None:
    """Parameters in millions, as their paper prints them."""
    with torch.device("meta"):
        model = timm.create_model(f"columnar_lvvit_{size}")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    assert model.blocks[0].norm1.eps == 1e-5


def test_the_dense_core_is_what_sparsifiners_table_prints() -> None:
    with torch.device("meta"):
        model = timm.create_model("columnar_lvvit_small")
    assert f"{rules.mhsa(model) / 1e6:.1f}" == "476.9"


@pytest.mark.parametrize("tokens", ["", "tome:r=3", "evit:keep=0.5,at=0"])
def test_macs_are_those_counted_by_running(tokens: str) -> None:
    model = small(tokens=tokens)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(IMAGES[:1])
    assert counter.get_total_flops() == 2 * sum(row.macs.total for row in model.costs())
    assert count_by_running(model).total == count(model).total


@torch.no_grad()
def test_the_maximum_is_over_the_tokens_left() -> None:
    model = small(tokens="evit:keep=0.5,at=0,fuse=false")
    features, context = model.forward_context(IMAGES)
    assert model.patch_logits(features).shape == (3, 8, 5)
    best = torch.stack([model.aux_head(features[:, 1 + i]) for i in range(8)]).amax(0)
    torch.testing.assert_close(model(IMAGES), model.head(features[:, 0]) + 0.5 * best)
    assert context.grid.patches == 8


@pytest.mark.parametrize("spec", [("foveal:keep=0.3", "tome:r=2"), ("sparsifiner:rank=5", "none")])
@torch.no_grad()
def test_converted_saved_and_loaded(spec: tuple[str, str], tmp_path: Path) -> None:
    attention, tokens = spec
    fast = attendless.convert(small(), attention, tokens=tokens, below_breakeven="keep")
    attendless.save(fast, tmp_path / "fast.safetensors")
    again = attendless.load(tmp_path / "fast.safetensors")
    assert isinstance(again, LVViT)
    assert again.tokens == ("tome:r=2" if tokens != "none" else "")
    assert torch.equal(again(IMAGES), fast(IMAGES))
    torch.testing.assert_close(original(fast)(IMAGES), small()(IMAGES))


@torch.no_grad()
def test_another_size_and_other_classes() -> None:
    model = small()
    model.set_input_size((96, 64))
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5)
    model.reset_classifier(3)
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 3)
    model.reset_classifier(0)
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 24)
    with pytest.raises(UserError, match=r"\(64, 64\) were given to a model for \(96, 64\)"):
        model(IMAGES)
    with pytest.raises(UserError, match="size of a convolutional stem is fixed"):
        model.set_input_size(patch_size=(8, 8))
    with pytest.raises(UserError, match="expected 'token'"):
        small(global_pool="avg")


def test_other_classes_than_the_weights() -> None:
    """Weights of 5 classes for 3 of one's own: both classifiers start anew, everything else is taken."""
    theirs, mine = (timm.create_model("columnar_lvvit_tiny", depth=1, num_classes=classes) for classes in (5, 3))
    load_weights(mine, theirs.state_dict(), 3)
    assert mine.aux_head.out_features == mine.head.out_features == 3
    assert torch.equal(mine.patch_embed.conv1.weight, theirs.patch_embed.conv1.weight)


def test_info_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert not main(["info", "columnar_lvvit_tiny"])
    assert "columnar_lvvit_tiny" in capsys.readouterr().out
