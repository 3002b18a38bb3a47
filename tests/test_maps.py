"""Maps of a model's layers: those of the tokens that each layer really gets, and nothing is paid when nobody asks."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import attendless
from attendless import (
    Attention,
    Context,
    Grid,
    Pyramid,
    UserError,
    convert,
)
from attendless.maps import (
    entry,
    layers,
    maps,
    on_grid,
    rollout,
)


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
        (found,) = maps(model, images, number)
        assert found.layer == number
        found = found.weights
        assert torch.equal(found, expected)
        assert found.shape[:2] == (2, attention.num_heads)
        torch.testing.assert_close(maps(model, images, number, query=3)[0].weights, expected[:, :, 3:4])
    assert torch.equal(maps(model, images, -1)[0].weights, found)
    every = maps(model, images)
    assert [one.layer for one in every] == numbers
    assert torch.equal(every[-1].weights, found)


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
    with pytest.raises(UserError, match="layer 1 has timm's WindowAttention, which provides no map: convert the model"):
        maps(swin(), images, 1)
    with pytest.raises(UserError, match="ResNet has no attention of attendless"):
        maps(timm.create_model("test_resnet"), images, 0)
    assert attendless.maps is maps


def vit(**changes: object) -> VisionTransformer:
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return VisionTransformer(**{**shape, **changes}).eval()


def test_a_model_of_timms_shows_what_it_looks_at_as_it_is() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)
    attn = model.blocks[1].attn
    with torch.no_grad():
        x = model.blocks[0](model._pos_embed(model.patch_embed(images)))
        q, k, _ = attn.qkv(model.blocks[1].norm1(x)).reshape(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
        expected = (attn.scale * q @ k.mT).softmax(-1)
    torch.testing.assert_close(maps(model, images, 1)[0].weights, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(maps(model, images, 1, heads=1)[0].weights, expected[:, 1:], atol=1e-6, rtol=0)
    with pytest.raises(UserError, match="head 2 does not exist"):
        maps(model, images, 1, heads=(0, 2))


def test_a_pixel_stands_for_the_patch_under_it() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)
    whole = maps(model, images, 2)[0]
    found = maps(model, images, 2, query=(31, 8))[0]  # the last column of the second row
    torch.testing.assert_close(found.weights, whole.weights[:, :, 8:9])
    assert torch.equal(found.on_grid().flatten(-2), found.weights[..., 1:])
    with pytest.raises(UserError, match="pixel 32,8 is outside the image: expected x,y below 32,32"):
        maps(model, images, 2, query=(32, 8))


@pytest.mark.parametrize("prefix", [0, 1])
def test_after_merging_a_map_is_on_the_picture_again(prefix: int) -> None:
    pool = {} if prefix else {"class_token": False, "global_pool": "avg"}
    model = convert(vit(**pool), "full", tokens="tome:r=5")
    images = torch.randn(2, 3, 32, 32)
    (found,) = maps(model, images, 2)
    assert found.weights.shape == (2, 2, prefix + 6, prefix + 6)
    spread = found.on_grid()
    for b in range(2):
        owners = found.grid.owners[b].tolist()
        for place, owner in enumerate(owners):
            expected = found.weights[b, :, :, prefix + owner] / owners.count(owner)
            torch.testing.assert_close(spread[b, :, :, place // 4, place % 4], expected)
    torch.testing.assert_close(spread.sum((-2, -1)), found.weights[..., prefix:].sum(-1))
    (asked,) = maps(model, images, 2, query=(20, 4))
    for b in range(2):
        token = prefix + int(found.grid.owners[b, 2])
        torch.testing.assert_close(asked.weights[b, :, 0], found.weights[b, :, token])


def test_a_dropped_patch_looks_at_nothing() -> None:
    model, images = convert(vit(), "full", tokens="evit:keep=0.5,at=0,fuse=false"), torch.randn(1, 3, 32, 32)
    (found,) = maps(model, images, 1)
    gone = sorted(set(range(16)) - set(found.grid.cells[0].tolist()))
    assert not found.on_grid().flatten(-2)[..., gone].any()
    with pytest.raises(UserError, match="was dropped before this layer"):
        maps(model, images, 1, query=(gone[0] % 4 * 8, gone[0] // 4 * 8))


def test_rollout_is_the_product_of_halved_maps() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)
    expected = torch.eye(17).expand(2, -1, -1)
    for one in maps(model, images):
        expected = (torch.eye(17) + one.weights.mean(1)) / 2 @ expected
    torch.testing.assert_close(rollout(model, images), expected)
    merged = rollout(convert(model, "full", tokens="tome:r=4"), images)
    assert merged.shape == (2, 9, 17)
    torch.testing.assert_close(merged.sum(-1), torch.ones(2, 9))
    with pytest.raises(UserError, match="rollout needs the same grid"):
        rollout(pyramid(), images)


def test_weights_on_a_grid_by_hand() -> None:
    grid = Grid(1, 3, 1, cells=torch.tensor([[1]]), sizes=torch.tensor([[2.0]]), owners=torch.tensor([[-1, 0, 0]]))
    weights = torch.tensor([[[0.4, 0.6]]])
    assert on_grid(weights, grid).tolist() == [[[[0.0, pytest.approx(0.3), pytest.approx(0.3)]]]]


@pytest.mark.parametrize("make", [columnar, pyramid, swin])
def test_a_model_that_was_asked_is_the_model_it_was(make) -> None:
    """So there is nothing that could cost a later forward anything."""
    model, images = make(), torch.randn(1, 3, 32, 32)
    model(images)

    def state() -> list[dict[str, object]]:
        return [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]

    def filled() -> list[dict[str, list[int]]]:
        parts = [
            {name: value for name, value in vars(module).items() if isinstance(value, dict)}
            for module in model.modules()
        ]
        return [{name: [*map(id, value.values())] for name, value in part.items()} for part in parts]

    before = state(), filled()
    maps(model, images, query=(9, 9))
    maps(model, images)
    assert (state(), filled()) == before
