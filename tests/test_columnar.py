"""The columnar backbone gives timm's own outputs under timm's own keys."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

from attendless import Columnar, UserError
from attendless.backbones import ColumnarDistilled

SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "num_heads": 3, "depth": 3, "num_classes": 7}
VARIANTS = {
    "plain": {},
    "non-square": {"img_size": (96, 64)},
    "odd grid": {"img_size": 80},
    "registers": {"reg_tokens": 4},
    "registers, no positions for them": {"reg_tokens": 4, "no_embed_class": True},
    "layer scale": {"init_values": 0.1},
    "qk-norm": {"qk_norm": True},
    "scale-norm": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "pre-norm": {"pre_norm": True},
    "no biases": {"qkv_bias": False},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "pool avg": {"global_pool": "avg"},
    "pool avgmax": {"global_pool": "avgmax"},
    "pool max": {"global_pool": "max"},
    "pool map": {"global_pool": "map", "class_token": False},
    "no pool": {"global_pool": ""},
    "no positions": {"pos_embed": "none"},
    "dynamic size": {"dynamic_img_size": True},
}


def pair(variant: dict) -> tuple[VisionTransformer, Columnar, torch.Tensor]:
    """timm's model and ours from the same draws, with every weight moved off its neutral start, and images."""
    arguments = SMALL | variant
    torch.manual_seed(1)
    theirs = VisionTransformer(**arguments).eval()
    for p in theirs.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    ours = Columnar(**arguments).eval()
    ours.load_state_dict(theirs.state_dict())
    size = arguments["img_size"]
    return theirs, ours, torch.randn(2, 3, *((size, size) if isinstance(size, int) else size))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_gives_timms_output(variant: dict) -> None:
    theirs, ours, x = pair(variant)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    if theirs.pos_embed is None and theirs.forward_features(x).shape[1] != ours.grid().tokens:
        pytest.skip("this timm drops the class token where there are no positions")
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x), atol=1e-5, rtol=0)
    if variant.get("dynamic_img_size"):
        y = torch.randn(1, 3, 48, 112)
        torch.testing.assert_close(ours(y), theirs(y), atol=1e-5, rtol=0)


def test_same_seed_same_first_weights_as_timm() -> None:
    torch.manual_seed(3)
    theirs = VisionTransformer(**SMALL)
    torch.manual_seed(3)
    ours = Columnar(**SMALL)
    assert all(torch.equal(a, b) for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True))


def test_distilled() -> None:
    theirs = VisionTransformerDistilled(**SMALL).eval()
    ours = ColumnarDistilled(**SMALL).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)
    assert ours.grid().prefix == 2


@pytest.mark.parametrize("variant", ["plain", "registers", "no class token"])
def test_forward_intermediates(variant: str) -> None:
    theirs, ours, x = pair(VARIANTS[variant])
    for fmt, norm, prefix, stop in itertools.product(("NCHW", "NLC"), (False, True), (False, True), (False, True)):
        words = {
            "indices": [0, 1],
            "output_fmt": fmt,
            "norm": norm,
            "return_prefix_tokens": prefix,
            "stop_early": stop,
        }
        torch.testing.assert_close(ours.forward_intermediates(x, **words), theirs.forward_intermediates(x, **words))
    as_dict = {"indices": 2, "output_dict": True, "return_prefix_tokens": True}
    torch.testing.assert_close(ours.forward_intermediates(x, **as_dict), theirs.forward_intermediates(x, **as_dict))


def test_gradient_checkpointing_changes_nothing() -> None:
    _, ours, x = pair({})
    ours.train()

    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        ours.set_grad_checkpointing(checkpointing)
        ours.zero_grad()
        ours(x).square().sum().backward()
        return [p.grad.clone() for p in ours.parameters() if p.grad is not None]

    torch.testing.assert_close(gradients(True), gradients(False), atol=0, rtol=0)


def test_set_input_size_and_reset_classifier() -> None:
    theirs, ours, _ = pair({"reg_tokens": 2})
    for model in (theirs, ours):
        model.set_input_size(img_size=(128, 80))
        torch.manual_seed(5)
        model.reset_classifier(11, "avg")
    x = torch.randn(1, 3, 128, 80)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)
    assert ours(x).shape == (1, 11)
    assert {str(block.attn.grid) for block in ours.blocks} == {"3+8x5"}


def test_layers_sum_to_the_model() -> None:
    for variant in VARIANTS.values():
        ours = Columnar(**SMALL | variant)
        assert sum(layer.params for layer in ours.costs()) == sum(p.numel() for p in ours.parameters())


def test_one_attention_per_layer() -> None:
    assert Columnar(**SMALL, attention="full").attention == "full"
    assert Columnar(**SMALL, attention="2xfull/full").attention == "full"
    with pytest.raises(UserError, match="names 2 layers, but the model has 3"):
        Columnar(**SMALL, attention="full/full")


def test_refusals_say_why() -> None:
    with pytest.raises(UserError, match="patch dropout"):
        Columnar(**SMALL, patch_drop_rate=0.5)
    model = Columnar(**SMALL)
    with pytest.raises(UserError, match="attn_mask"):
        model(torch.randn(1, 3, 64, 64), attn_mask=torch.ones(17, 17))
    with pytest.raises(UserError, match="ParallelScalingBlock"):
        Columnar(**SMALL, block_fn=timm.models.vision_transformer.ParallelScalingBlock)


@pytest.mark.data
@pytest.mark.parametrize("size", [224, 384, (160, 288), (208, 240)], ids=str)
def test_real_weights_give_timms_output(data_dir: Path, size: int | tuple[int, int]) -> None:
    weights = load_file(data_dir / "weights" / "deit_tiny_patch16_224.safetensors")
    theirs = timm.create_model("deit_tiny_patch16_224").eval()
    ours = Columnar(embed_dim=192, depth=12, num_heads=3).eval()
    for model in (theirs, ours):
        model.load_state_dict(weights)
        model.set_input_size(img_size=size)
    x = torch.randn(2, 3, *((size, size) if isinstance(size, int) else size))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)
