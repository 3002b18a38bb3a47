"""Maps of a model's layers: those of the tokens that each layer really gets, and nothing is paid when nobody asks."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import attendless
from attendless import Attention, Context, Pyramid, UserError, convert
from attendless.maps import entry, layers, maps


def columnar() -> nn.Module:
    dense = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5)
    return convert(dense.eval(), "full/window:size=2/topk:keep=0.5", below_breakeven="keep")


def pyramid() -> nn.Module:
    shape = {"embed_dims": (16, 32), "depths": (2, 2), "num_heads": (1, 2)}
    return Pyramid("window:size=2/full", img_size=32, num_classes=5, **shape).eval()


def swin() -> nn.Module:
    shape = {"embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, **shape).eval()
    return convert(model, "full", layers="0,2", below_breakeven="keep")


def really_given(model: nn.Module, images: torch.Tensor) -> list[tuple[Attention, torch.Tensor, Context]]:
    """What every attention is called with in a plain forward."""
    given: list[tuple[Attention, torch.Tensor, Context]] = []
    ours = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [attention.register_forward_pre_hook(lambda m, a: given.append((m, *a))) for attention in ours]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return given


@pytest.mark.parametrize("make", [columnar, pyramid, swin])
def test_a_map_is_of_what_the_layer_really_gets(make) -> None:
    model, images = make(), torch.randn(2, 3, 32, 32)
    given = really_given(model, images)
    numbers = [i for i, attention in enumerate(layers(model)) if isinstance(attention, Attention)]
    assert [layers(model)[i] for i in numbers] == [attention for attention, *_ in given]
    for number, (attention, x, context) in zip(numbers, given, strict=True):
        with torch.no_grad():
            expected = attention.map(x, context)
            assert torch.equal(entry(model, images, number).x, x)
        found = maps(model, images, number)
        assert torch.equal(found, expected)
        assert found.shape[:2] == (2, attention.num_heads)
        torch.testing.assert_close(maps(model, images, number, query=3), expected[:, :, 3:4])
    assert torch.equal(maps(model, images, -1), found)


@pytest.mark.parametrize("make", [columnar, swin])
def test_asking_leaves_the_model_as_it_was_and_runs_no_later_layer(make) -> None:
    model, images = make().train(), torch.randn(1, 3, 32, 32)
    expected = model.eval()(images)
    model.train()
    last, calls = layers(model)[-1], []
    hook = last.register_forward_pre_hook(lambda module, arguments: calls.append(1))
    maps(model, images, 0)
    hook.remove()
    assert calls == []
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model.eval()(images), expected)


def test_what_has_no_map_is_said() -> None:
    images = torch.randn(1, 3, 32, 32)
    with pytest.raises(UserError, match="layer 3 does not exist: Columnar has layers 0 to 2"):
        maps(columnar(), images, 3)
    with pytest.raises(UserError, match="layer 1 attends by timm's WindowAttention, which keeps no map: convert it"):
        maps(swin(), images, 1)
    with pytest.raises(UserError, match="ResNet has no attention of ours"):
        maps(timm.create_model("test_resnet"), images, 0)
    assert attendless.maps is maps
