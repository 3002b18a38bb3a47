"""patch and unpatch: attentions of known classes, found anywhere, adapted in place, and given back bit for bit."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from typing import Any

import pytest
import timm
import torch
from torch import nn

import attendless
from attendless import UserError
from attendless.integrations.timm_inplace.adapted import Adapted

VIT = ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64, "num_classes": 5})
DINOV3 = ("vit_small_patch16_dinov3", {"depth": 2, "embed_dim": 96, "num_heads": 3, "num_classes": 5})


def build(kind: tuple[str, dict]) -> Any:
    model = timm.create_model(kind[0], **kind[1])
    for key, parameter in model.named_parameters():
        if "norm" not in key:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


class Detector(nn.Module):
    """Somebody's model with a ViT deep inside."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"vit": vit})
        self.box = nn.Linear(5, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.box(self.body["vit"](images))


@torch.no_grad()
@pytest.mark.parametrize("kind", [VIT, DINOV3], ids=lambda kind: kind[0])
def test_unpatch_restores_bit_for_bit(kind: tuple[str, dict]) -> None:
    model = build(kind)
    before, x = copy.deepcopy(model), torch.randn(2, 3, 64, 64)
    dense, weights = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    attendless.patch(model, "foveal:keep=0.1,tile=1", below_breakeven="keep")
    assert not torch.equal(model(x), dense)
    assert model.state_dict().keys() == weights.keys()
    assert attendless.unpatch(model) == 2
    assert torch.equal(model(x), dense)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    for mine, theirs in zip(model.modules(), before.modules(), strict=True):
        assert type(mine) is type(theirs)
        assert vars(mine).keys() == vars(theirs).keys()
        assert not mine._forward_pre_hooks
    assert attendless.unpatch(model) == 0


@torch.no_grad()
def test_found_deep_inside_and_what_is_left_is_told() -> None:
    vit = build(VIT)
    model = Detector(vit)
    model.body["beit"] = timm.create_model("beit_base_patch16_224", depth=1, img_size=32)
    model.body["other"] = timm.layers.Attention(32, 2)
    report = attendless.patch(model, "foveal:keep=1", below_breakeven="keep")
    assert [row.name for row in report.layers] == ["body.vit.blocks.0", "body.vit.blocks.1"]
    left = dict(report.unserved)
    assert "relative position bias" in left["body.beit.blocks.0.attn"]
    assert "tells the grid of its tokens" in left["body.other"]
    assert "not exchanged: body.other" in str(report)
    x = torch.randn(1, 3, 64, 64)
    ours = model(x)
    attendless.unpatch(model)
    torch.testing.assert_close(ours, model(x), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_patching_again_exchanges() -> None:
    model, x = build(VIT), torch.randn(1, 3, 64, 64)
    attendless.patch(model, "foveal:keep=0.2,tile=1", below_breakeven="keep")
    once = model(x)
    attendless.patch(model, "window:size=2", below_breakeven="keep")
    assert not torch.equal(model(x), once)
    assert {str(m.spec) for m in model.modules() if isinstance(m, Adapted)} == {"window:size=2"}
    attendless.patch(model, "foveal:keep=0.2,tile=1", below_breakeven="keep")
    torch.testing.assert_close(model(x), once, atol=0, rtol=0)
    assert len(model.patch_embed._forward_pre_hooks) == 1


@torch.no_grad()
@pytest.mark.parametrize("first", ["", "foveal:keep=0.3,tile=1"], ids=["as it was", "patched before"])
def test_an_error_at_one_layer_leaves_all_layers_as_they_were(first: str) -> None:
    model, x = build(VIT), torch.randn(1, 3, 64, 64)
    if first:
        attendless.patch(model, first, below_breakeven="keep")
    before, kinds = model(x), [type(module) for module in model.modules()]
    with pytest.raises(UserError, match="'xca' does not go without projections"):
        attendless.patch(model, "window:size=2/xca", below_breakeven="keep")
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(x), before)
    assert len(model.patch_embed._forward_pre_hooks) == bool(first)


@torch.no_grad()
def test_a_model_that_no_file_describes_is_converted_in_a_copy(tmp_path) -> None:
    """A detector with a ViT inside, and timm's `features_only`."""
    features = timm.create_model(VIT[0], **VIT[1], features_only=True, out_indices=[1]).eval()
    x = torch.randn(1, 3, 64, 64)
    for model in (Detector(build(VIT)), features):
        ours = attendless.convert(model, "foveal:keep=0.2,tile=1", below_breakeven="keep")
        twin = copy.deepcopy(model)
        attendless.patch(twin, "foveal:keep=0.2,tile=1", below_breakeven="keep")
        for mine, theirs in zip(*(out if isinstance(out, list) else [out] for out in (ours(x), twin(x))), strict=True):
            assert torch.equal(mine, theirs)
        assert not any(isinstance(module, Adapted) for module in model.modules())
        with pytest.raises(UserError, match="cannot be saved"):
            attendless.save(ours, tmp_path / "m.safetensors")
        with pytest.raises(UserError, match="keeps its own layers, which need every token"):
            attendless.convert(model, tokens="tome:r=2")


def test_where_it_does_not_pay_nothing_is_touched() -> None:
    model = build(VIT)
    report = attendless.patch(model, "foveal:keep=0.9")
    assert {row.decision for row in report.layers} == {"left full"}
    assert not any(isinstance(module, Adapted) for module in model.modules())
    assert not model.patch_embed._forward_pre_hooks
    assert attendless.patch(build(DINOV3), "foveal:keep=0.1", size=1024).layers[0].grid == "5+64x64"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention": "xca"}, "'xca' does not go without projections"),
        ({"attention": "foveal", "tokens": "tome:r=2"}, "need every token"),
        ({"attention": "foveal", "below_breakeven": "maybe"}, "below_breakeven"),
        ({"attention": "foveal", "size": 8}, "size 8 is less than a patch of vit_tiny_patch16_224"),
        ({"attention": "foveal", "size": 0}, "size 0 cannot be read"),
        ({"attention": "foveal", "size": "big"}, "size 'big' cannot be read"),
    ],
)
def test_refused_by_name(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        attendless.patch(build(VIT), **given)


def test_names_are_no_models() -> None:
    for do in (lambda x: attendless.patch(x, "foveal"), attendless.unpatch, attendless.convert):
        with pytest.raises(UserError, match=r"expected a model, a torch\.nn\.Module, not str 'vit_tiny_patch16_224'"):
            do("vit_tiny_patch16_224")


def test_models_with_nothing_to_patch_are_refused() -> None:
    with pytest.raises(UserError, match="the images of a batch have a grid each"):
        attendless.patch(timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=64, num_heads=2), "foveal")
    with pytest.raises(UserError, match="no attention of a known class"):
        attendless.patch(nn.Linear(2, 2), "foveal")
    with pytest.raises(UserError, match=r"attendless\.convert exchanges its attentions"):
        attendless.patch(timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1)), "window")
    with pytest.raises(UserError, match="on the device meta: load it first"):
        attendless.patch(build(DINOV3).to("meta"), "foveal", below_breakeven="keep")
    with pytest.raises(UserError, match="a model of attendless already"):
        attendless.patch(timm.create_model("columnar_micro_patch4_32"), "foveal")


def test_a_mask_is_refused_not_ignored() -> None:
    model = build(DINOV3)
    if "is_causal" not in inspect.signature(model.forward).parameters:
        pytest.skip(f"timm {timm.__version__} gives its models no mask")
    attendless.patch(model, "foveal:keep=0.5", below_breakeven="keep")
    with pytest.raises(UserError, match="cannot honour a mask"):
        model(torch.randn(1, 3, 64, 64), is_causal=True)


# Where tokens stand ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_every_image_has_its_own_grid() -> None:
    """As many tokens on other grids: windows tell them apart."""
    model = build(DINOV3)
    attendless.patch(model, "window:size=2,bias=false", below_breakeven="keep")
    for size in ((64, 64), (32, 128), (128, 32)):
        alone = build(DINOV3)
        alone.load_state_dict(model.state_dict())
        alone.set_input_size(img_size=size)
        ours = attendless.convert(alone, "window:size=2,bias=false", below_breakeven="keep")
        x = torch.randn(1, 3, *size)
        torch.testing.assert_close(model(x), ours(x))


@torch.no_grad()
def test_threads_do_not_mix_up_grids() -> None:
    model = build(DINOV3)
    attendless.patch(model, "window:size=2,bias=false", below_breakeven="keep")
    images = [torch.randn(1, 3, *size) for size in ((64, 64), (32, 128))]
    alone = [model(x) for x in images]
    wrong: list[int] = []
    together = threading.Barrier(2)

    def run(i: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                together.wait()
                if not torch.allclose(model(images[i]), alone[i], atol=1e-5):
                    wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tokens_that_do_not_fit_are_refused() -> None:
    model = build(DINOV3)
    attendless.patch(model, "foveal:keep=0.5", below_breakeven="keep")
    with pytest.raises(UserError, match="no image went through"):
        model.blocks[0](torch.randn(1, 21, 96))
    model(torch.randn(1, 3, 64, 64))
    with pytest.raises(UserError, match="cut into 4x4 patches, and 15 arrive"):
        model.blocks[0](torch.randn(1, 20, 96))


def test_checkpointing_runs_a_layer_again_on_its_own_grid() -> None:
    model = build(DINOV3)
    attendless.patch(model, "window:size=2,bias=false", below_breakeven="keep")
    x, wide = torch.randn(1, 3, 64, 64), torch.randn(1, 3, 32, 128)
    model(x).sum().backward()
    plain = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing()
    once = model(x).sum()
    model(torch.randn(1, 3, 96, 96))  # another image in between
    once.backward()
    torch.testing.assert_close(model.blocks[0].attn.qkv.weight.grad, plain)
    twice = model(x).sum()
    model(wide)  # as many tokens, another grid: which one is run again cannot be told
    with pytest.raises(UserError, match="2x8 or 4x4 may be its patches"):
        twice.backward()


@torch.no_grad()
def test_a_copy_is_on_its_own() -> None:
    model, x = build(DINOV3), torch.randn(1, 3, 64, 64)
    attendless.patch(model, "foveal:keep=0.3", below_breakeven="keep")
    ours = model(x)
    twin = copy.deepcopy(model)
    attendless.unpatch(model)
    assert torch.equal(twin(x), ours)
    assert twin.patch_embed._forward_pre_hooks
    assert not model.patch_embed._forward_pre_hooks
    attendless.unpatch(twin)
    assert torch.equal(twin(x), model(x))
    assert not twin.patch_embed._forward_pre_hooks


@torch.no_grad()
def test_another_process_gets_a_copy() -> None:
    """As torch's own processes hand models on."""
    model, x = build(DINOV3), torch.randn(1, 3, 64, 64)
    attendless.patch(model, "foveal:keep=0.3", below_breakeven="keep")
    ours = model(x)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), ours)
    attendless.unpatch(twin)
    assert not torch.equal(twin(x), ours)
    assert torch.equal(model(x), ours)


def test_no_file_describes_what_was_patched(tmp_path) -> None:
    model = build(VIT)
    attendless.patch(model, "foveal:keep=0.3", below_breakeven="keep")
    with pytest.raises(UserError, match="was patched in place, which no file describes: save what attendless"):
        attendless.save(model, tmp_path / "m.safetensors")


def test_dropout_is_the_modules_own() -> None:
    model = timm.create_model(VIT[0], **VIT[1], attn_drop_rate=0.5).train()
    attendless.patch(model, "full")
    x = torch.randn(1, 3, 64, 64)
    assert not torch.equal(model(x), model(x))
    for block in model.blocks:
        block.attn.attn_drop.p = 0.0
    assert torch.equal(model(x), model(x))
