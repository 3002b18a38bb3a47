"""The class-token-only last layer (`readout`): the same outputs with fewer multiply-accumulates."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import attendless
from attendless import Columnar, UserError
from attendless.attention import attentions
from attendless.backbones import ColumnarDistilled, Pyramid
from attendless.backbones.class_token_tail import observed
from attendless.backbones.probe import Probe
from attendless.convert import open_model
from attendless.convert.conversion import convert_with_report
from attendless.convert.source import comparable
from attendless.dense.features import Features
from attendless.measure import parts
from attendless.measure.bench import Conditions, bench_rows
from attendless.measure.macs import count, count_by_running
from attendless.predict import Opening
from attendless.tokens import reducers
from attendless_cli.main import main

SMALL: dict[str, Any] = {
    "img_size": 64, "patch_size": 8, "embed_dim": 48, "num_heads": 3, "depth": 3, "num_classes": 7,
}  # fmt: skip
ATTENTIONS = [example for cls in attentions().values() for example in (cls.examples or (cls.name,))]
ATTENTIONS += ["bigbird:form=1d,gate=W,block=4", "window:size=4", "foveal:keep=0.1,order=0"]
TOKENS = ["tome:r=6", "tome:r=6,protect=0.1", "tome:r=6,until=2"]
TOKENS += [example for cls in reducers().values() for example in cls.examples]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"reg_tokens": 4},
    "layer scale": {"init_values": 0.1},
    "norms": {"qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True},
    "no biases": {"qkv_bias": False},
    "normed last": {"fc_norm": True},
}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def build(attention: str = "full", tokens: str = "", cls: Any = Columnar, **more: Any) -> Any:
    """A small model, every weight off its neutral start; skipped where the two do not go together."""
    torch.manual_seed(0)
    specs = f"2xfull/{attention}"
    try:
        model = cls(**{**SMALL, **more}, attention=specs, tokens=tokens).eval()
    except UserError as reason:
        pytest.skip(str(reason))
    for weight in model.parameters():
        weight.data.add_(0.05 * torch.randn_like(weight))
    return model


class Monitor(Probe):
    """Records how many tokens reach the head, without a hook, which would see all of them."""

    def __init__(self, model: Any, calls: list[int]) -> None:
        super().__init__(model.forward_head)
        self.calls = calls

    def __call__(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        self.calls.append(x.shape[1])
        return super().__call__(x, **more)


def monitor(model: Any, calls: list[int]) -> None:
    model.forward_head = Monitor(model, calls)


def assert_same(model: Any, images: torch.Tensor = IMAGES) -> None:
    assert not model.needs_patches()
    with torch.no_grad():
        whole, features = model(images), model.forward_features(images)
        model.readout = True
        calls: list[int] = []
        monitor(model, calls)
        alone = model(images)
        assert calls == [model.num_prefix_tokens]
        torch.testing.assert_close(alone, whole, atol=2e-5, rtol=1e-5)
        assert torch.equal(model.forward_features(images), features)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_answers_the_same(attention: str) -> None:
    assert_same(build(attention))


@pytest.mark.parametrize("attention", ["full", "foveal:keep=0.2", "performer", "sparsifiner:rank=8"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_on_fewer_tokens(attention: str, tokens: str) -> None:
    assert_same(build(attention, tokens))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("attention", ["full", "foveal:keep=0.2"])
def test_variants(attention: str, variant: dict[str, Any]) -> None:
    assert_same(build(attention, **variant))


def test_two_prefix_tokens() -> None:
    assert_same(build("foveal", cls=ColumnarDistilled))


@pytest.mark.parametrize("tokens", ["", "tome:r=6"])
@pytest.mark.parametrize("attention", ["full", "performer"])
def test_counts_what_runs(attention: str, tokens: str) -> None:
    model = build(attention, tokens)
    before = count(model).total
    model.readout = True
    assert count(model).mlp == count_by_running(model).mlp
    assert count(model).projections == count_by_running(model).projections
    assert count(model).total < before


def test_gradients_are_the_same() -> None:
    model = build("foveal:keep=0.2")
    images = IMAGES.clone().requires_grad_()
    whole = torch.autograd.grad(model(images).square().sum(), images)[0]
    model.readout = True
    alone = torch.autograd.grad(model(images).square().sum(), images)[0]
    torch.testing.assert_close(alone, whole, atol=1e-4, rtol=1e-4)


def test_who_hooks_the_last_layer_sees_every_patch() -> None:
    model = attendless.convert(build(), tokens="tome:r=6")
    assert model.readout
    seen: list[torch.Tensor] = []
    hook = model.blocks[-1].attn.qkv.register_forward_hook(lambda _m, _i, out: seen.append(out))
    watched = model(IMAGES)
    hook.remove()
    assert seen[0].shape[1] == 1 + 64 - 2 * 6
    torch.testing.assert_close(model(IMAGES), watched, atol=2e-5, rtol=1e-5)
    assert len(seen) == 1


def test_convert_asks_for_it_where_something_changes() -> None:
    dense = timm.create_model("vit_tiny_patch16_224", num_classes=7).eval()
    images = torch.randn(1, 3, 224, 224)
    same = attendless.convert(dense, "full")
    assert not same.readout
    assert torch.equal(same(images), dense(images))
    assert attendless.convert(dense, "full", tokens="tome:r=8").readout
    assert attendless.convert(dense, "foveal", below_breakeven="keep").readout
    again = attendless.convert(attendless.convert(dense, "full", tokens="tome:r=8"), tokens="none")
    assert not again.readout
    assert torch.equal(again(images), dense(images))
    mean = timm.create_model("vit_tiny_patch16_224", num_classes=7, global_pool="avg").eval()
    assert not attendless.convert(mean, "full", tokens="tome:r=8").readout


def test_models_that_answer_from_patches_have_none() -> None:
    assert build(global_pool="avg").needs_patches()
    assert timm.create_model("columnar_lvvit_tiny").needs_patches()
    shape = {"embed_dims": (8, 16), "depths": (1, 1), "num_heads": (1, 2), "mlp_ratios": (2, 2)}
    assert Pyramid("full", img_size=64, **shape).needs_patches()


def test_a_file_keeps_it(tmp_path: Path) -> None:
    model = attendless.convert(build(), tokens="tome:r=6")
    attendless.save(model, tmp_path / "m.safetensors")
    loaded = attendless.load(tmp_path / "m.safetensors")
    assert loaded.readout
    assert torch.equal(loaded(IMAGES), model(IMAGES))


def test_training_goes_through_every_patch() -> None:
    model = build("foveal:keep=0.2").train()
    model.readout = True
    calls: list[int] = []
    monitor(model, calls)
    model(IMAGES)
    assert calls == [65]


def test_another_head_takes_it_back() -> None:
    model = attendless.convert(build(), tokens="tome:r=6")
    model.reset_classifier(7, global_pool="avg")
    whole = count(model).total
    found = model(IMAGES)
    model.readout = False
    assert torch.equal(found, model(IMAGES))
    assert count(model).total == whole


def test_who_computes_the_projection_himself_is_asked() -> None:
    model = attendless.convert(build(), "foveal", below_breakeven="keep")
    linear = model.blocks[-1].attn.qkv
    expected = model(IMAGES)
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[1])
        return torch.nn.functional.linear(x, linear.weight, linear.bias)

    linear.forward = forward  # as offloading does
    torch.testing.assert_close(model(IMAGES), expected, atol=2e-5, rtol=1e-5)
    assert calls == [65]


def test_gradients_of_the_last_layer_are_seen_whole() -> None:
    model = attendless.convert(build(), "foveal", below_breakeven="keep")
    seen: list[tuple[int, ...]] = []
    hook = model.blocks[-1].mlp.register_full_backward_hook(lambda _m, _i, out: seen.append(tuple(out[0].shape)))
    model(IMAGES).sum().backward()
    hook.remove()
    assert seen == [(2, 65, 48)]


def test_the_way_back_is_reported_whole() -> None:
    fast = attendless.convert(build(), "foveal:keep=0.2", tokens="tome:r=6", below_breakeven="keep")
    whole, report = convert_with_report(fast, "full", tokens="none")
    rows = [row for row in whole.costs() if row.spec is not None]
    assert [row.after for row in report.layers] == [row.macs for row in rows]
    assert report.layers[-1].before.mlp < report.layers[-1].after.mlp


def test_a_dense_head_has_every_patch_computed_and_counted() -> None:
    model = attendless.convert(build(img_size=64), "foveal:keep=0.2", below_breakeven="keep")
    assert not Features(model).backbone.readout


def test_the_layer_view_calls_its_projections_that() -> None:
    model = attendless.convert(build(embed_dim=192), "foveal:keep=0.2", below_breakeven="keep")
    attn = model.blocks[-1].attn
    assert (attn, "project_prefix", "projections") in parts.places(model)
    with parts.shadowed(parts.places(model), parts._Marks(torch.device("cpu"))):
        assert model.tail.attends_rows, "profiling does not change what is computed"
        assert not observed(model.tail, model.norm)


# Models whose output depends on patches ------------------------------------------------------------------------------


def mean_of_patches(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x[:, self.num_prefix_tokens :].mean(1)


def head_on_patches(self: Any, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
    return self.head(mean_of_patches(self, x))


class TokenBatchNorm(torch.nn.Module):
    """A norm whose statistics mix all tokens of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean((1, 2), keepdim=True)) / x.std((1, 2), keepdim=True)


class OnPatches(Columnar):
    forward_head = head_on_patches


class PoolsPatches(Columnar):
    pool = mean_of_patches


def assert_whole(model: Any) -> None:
    """`model` computes every patch of the last layer, also when asked not to."""
    assert model.needs_patches()
    assert model.tail is None
    found = model(IMAGES)
    expected = model.forward_head(model.forward_features(IMAGES))
    assert found.isfinite().all()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", ["forward_head", "pool"])
@pytest.mark.parametrize("timms", [True, False])
def test_a_method_replaced_on_the_instance_gets_every_patch(method: str, timms: bool) -> None:
    model = VisionTransformer(**SMALL).eval() if timms else build()
    replacement = {"forward_head": head_on_patches, "pool": mean_of_patches}[method]
    setattr(model, method, types.MethodType(replacement, model))
    expected = model(IMAGES)
    fast = attendless.convert(model, "foveal:keep=1", below_breakeven="keep", readout=True)
    assert not fast.readout
    assert getattr(fast, method).__self__ is fast, "bound to the copy, whose weights it must use"
    assert_whole(fast)
    torch.testing.assert_close(fast(IMAGES), expected, atol=2e-5, rtol=1e-5)


def test_a_method_replaced_after_conversion_gets_every_patch() -> None:
    fast = attendless.convert(build(), tokens="tome:r=6")
    assert fast.tail is not None
    fast.pool = types.MethodType(mean_of_patches, fast)
    assert_whole(fast)


@pytest.mark.parametrize("cls", [OnPatches, PoolsPatches])
def test_a_subclass_that_reads_patches_gets_every_patch(cls: type[Columnar]) -> None:
    fast = attendless.convert(build(cls=cls), "foveal:keep=0.2", below_breakeven="keep", readout=True)
    assert not fast.readout
    fast.readout = True
    assert_whole(fast)


@pytest.mark.parametrize("norm", [TokenBatchNorm(), torch.nn.BatchNorm1d(65), torch.nn.LayerNorm((65, 48))])
def test_a_last_norm_that_mixes_tokens_gets_every_patch(norm: torch.nn.Module) -> None:
    model = build()
    model.norm = norm.eval()
    fast = attendless.convert(model, "foveal:keep=0.2", below_breakeven="keep", readout=True)
    assert not fast.readout
    fast.readout = True
    assert_whole(fast)


def test_a_norm_inside_the_last_block_that_mixes_tokens_gets_every_patch() -> None:
    model = build()
    model.blocks[-1].norm2 = TokenBatchNorm()
    model.readout = True
    assert_whole(model)


def test_a_replaced_output_is_not_saved(tmp_path: Path) -> None:
    model = build()
    model.pool = types.MethodType(mean_of_patches, model)
    with pytest.raises(UserError, match="pool was replaced on the instance"):
        attendless.save(model, tmp_path / "m.safetensors")


@pytest.mark.parametrize("part", ["", "attn", "attn.proj", "mlp", "norm2"])
def test_a_forward_replaced_in_the_last_block_gets_every_patch(part: str) -> None:
    model = attendless.convert(build(), "foveal:keep=0.2", below_breakeven="keep")
    module, calls = model.blocks[-1].get_submodule(part), list[int]()
    own = module.forward

    def forward(x: torch.Tensor, *more: Any) -> Any:
        calls.append(x.shape[1])
        return own(x, *more)

    expected = model(IMAGES)
    module.forward = forward
    torch.testing.assert_close(model(IMAGES), expected, atol=2e-5, rtol=1e-5)
    assert calls == [65]


# The switch ----------------------------------------------------------------------------------------------------------


def test_full_attention_may_have_it_too() -> None:
    dense = VisionTransformer(**SMALL).eval()
    fast, report = convert_with_report(dense, "full", readout=True)
    assert fast.readout
    assert report.as_dict()["readout"]
    assert report.layers[-1].after.mlp < report.layers[-1].before.mlp
    assert fast.state_dict().keys() == dense.state_dict().keys()
    torch.testing.assert_close(fast(IMAGES), dense(IMAGES), atol=2e-5, rtol=1e-5)
    assert attendless.convert(dense, readout=True).readout, "no attention needs to be named"


def test_it_can_be_refused() -> None:
    assert not attendless.convert(build(), tokens="tome:r=6", readout=False).readout


def test_a_request_that_cannot_be_met_is_reported() -> None:
    _, report = convert_with_report(build(global_pool="avg"), "full", readout=True)
    assert not report.tail
    assert "global_pool='avg' reads patches" in report.note


@pytest.mark.parametrize(("attention", "readout"), [(None, True), ("full", True), ("foveal:keep=0.2", False)])
def test_open_model_takes_it(attention: str | None, readout: bool) -> None:
    opening = {"size": 32, "below_breakeven": "keep", "readout": readout}
    assert open_model("vit_tiny_patch16_224", attention=attention, **opening).readout is readout


def test_a_file_is_opened_with_or_without_it(tmp_path: Path) -> None:
    attendless.save(attendless.convert(build(), tokens="tome:r=6"), tmp_path / "m.safetensors")
    assert open_model(tmp_path / "m.safetensors").readout
    whole = open_model(tmp_path / "m.safetensors", readout=False)
    assert not whole.readout
    assert whole.tokens == "tome:r=6"


@pytest.mark.parametrize(
    ("attentions", "tokens", "given", "expected"),
    [
        (["full", "foveal:keep=0.1"], [], None, True),
        (["full", "2xfull/10xfoveal:keep=0.1"], [], False, False),
        (["full", "full"], [], None, None),
        (["full"], ["none", "tome:r=8"], None, True),
        (["foveal:keep=0.1"], [], None, None),
        ([], [], None, None),
        (["full"], [], True, True),
    ],
)
def test_a_comparison_gives_it_to_all_or_to_none(
    attentions: list[str], tokens: list[str], given: bool | None, expected: bool | None
) -> None:
    assert comparable({"readout": given}, attentions, tokens)["readout"] is expected


@pytest.mark.parametrize("switch", [[], ["--readout"], ["--no-readout"]])
def test_info_never_exceeds_its_maximum_speedup(tmp_path: Path, switch: list[str]) -> None:
    out = tmp_path / "info.json"
    command = ["info", "vit_tiny_patch16_224", "--size", "64", "--attention", "full", "topk:keep=0.01", "performer"]
    assert main([*command, *switch, "--json", str(out)]) == 0
    full, *others = json.loads(out.read_text())["rows"]
    tail = [row["layers"][-2]["macs"]["mlp"] < row["layers"][-3]["macs"]["mlp"] for row in (full, *others)]
    assert tail == [switch != ["--no-readout"]] * 3
    for row in others:
        assert full["macs"]["total"] / row["macs"]["total"] <= full["cap"]


def test_bench_gives_it_to_every_attention() -> None:
    how = Conditions(budget=0.05, memory=False, throughput=False, parts=False)
    opening = {"below_breakeven": "keep"}
    rows = list(bench_rows("vit_tiny_patch16_224", ["full", "foveal:keep=0.2"], [32], how, **opening))
    whole = count(timm.create_model("vit_tiny_patch16_224", img_size=32)).mlp
    assert [row.setup.macs.mlp for row in rows] == [whole * 11 // 12 + whole // 12 // 5] * 2


def test_the_command_converts_to_it_alone(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    assert main(["convert", "vit_tiny_patch16_224", "--size", "32", "--readout", "--out", str(out)]) == 0
    assert attendless.load(out).readout


def test_predictors_open_models_with_it() -> None:
    opened = Opening("vit_tiny_patch16_224", size=(32, 32), readout=True)
    assert opened._asked()["readout"]
    assert opened.open().card.scores == 1000
