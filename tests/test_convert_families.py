"""timm's Swin, PVT v2 and XCiT, and our own pyramids: what they had, put back, computes the same; the rest is told."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attendless import UserError
from attendless.backbones import Pyramid
from attendless.convert import convert, convert_with_report, load, save
from attendless.integrations.discovery import find_slots

SWIN = ("swin_tiny_patch4_window7_224", {"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "img_size": 112})
PVT = ("pvt_v2_b0", {"depths": (1, 1, 1, 1)})
LINEAR = ("pvt_v2_b2_li", {"depths": (1, 1, 1, 1), "embed_dims": (32, 64, 160, 256)})
XCIT = ("xcit_nano_12_p16_224", {"depth": 2, "embed_dim": 32})
SIZES = {SWIN[0]: (112, 112), PVT[0]: (224, 224), LINEAR[0]: (224, 224), XCIT[0]: (224, 224)}
#: What each of these models attends with, in our words.
OWN = {
    SWIN[0]: "window+window:shift=3",
    PVT[0]: "reduced:ratio=8/reduced:ratio=4/reduced/reduced:ratio=1",
    LINEAR[0]: "reduced:pool=7",
    XCIT[0]: "xca",
}


def build(kind: tuple[str, dict]) -> nn.Module:
    model = timm.create_model(kind[0], num_classes=7, **kind[1])
    for name, parameter in model.named_parameters():
        if "norm" not in name and "bn" not in name:
            nn.init.normal_(parameter, mean=0.01, std=0.1)
    return model.eval()


@pytest.fixture(params=[SWIN, PVT, LINEAR, XCIT], ids=lambda kind: kind[0])
def kind(request: pytest.FixtureRequest) -> tuple[str, dict]:
    return request.param


@torch.no_grad()
def test_their_own_attention_as_ours_computes_the_same(kind: tuple[str, dict]) -> None:
    model = build(kind)
    x = torch.randn(1, 3, *SIZES[kind[0]])
    ours, report = convert_with_report(model, OWN[kind[0]], below_breakeven="keep", check=x)
    assert all(site.spec is not None for site in find_slots(ours))
    assert all(not row.new and not row.dropped for row in report.layers)
    torch.testing.assert_close(ours(x), model(x), atol=1e-4, rtol=1e-4)
    # And our count of what they cost agrees with theirs.
    assert [row.before.core for row in report.layers] == [row.after.core for row in report.layers]


@torch.no_grad()
def test_counts_of_their_own_attention_are_what_runs(kind: tuple[str, dict]) -> None:
    model = build(kind)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.randn(1, 3, *SIZES[kind[0]]))
    for site in find_slots(model):
        executed = sum(counter.get_flop_counts()[f"{type(model).__name__}.{site.name}.attn"].values()) // 2
        assert site.now.total == executed, site.name


def test_another_attention_runs_trains_and_says_what_was_lost(kind: tuple[str, dict]) -> None:
    model = build(kind)
    before = [type(m) for m in model.modules()]
    ours, report = convert_with_report(model, "linformer:keys=8", below_breakeven="keep")
    assert [type(m) for m in model.modules()] == before
    assert {row.decision for row in report.layers} == {"converted"}
    assert {name for row in report.layers for name in row.new} == {"down"}
    lost = {name for row in report.layers for name in row.dropped}
    expected = {SWIN[0]: "relative_position_bias_table", XCIT[0]: "temperature"}.get(kind[0], "sr_norm.weight")
    assert expected in lost
    ours.train()(torch.randn(2, 3, *SIZES[kind[0]])).mean().backward()
    assert all(s.attn.down.grad is not None for s in find_slots(ours))


def test_layers_below_break_even_keep_what_they_had() -> None:
    model = build(SWIN)
    ours, report = convert_with_report(model, "full")
    assert {row.decision for row in report.layers} == {"left as it was"}
    assert {row.attention for row in report.layers} == {"WindowAttention"}
    x = torch.randn(1, 3, 112, 112)
    with torch.no_grad():
        assert torch.equal(ours(x), model(x))


def test_one_layer_alone_and_another_size() -> None:
    ours = convert(build(SWIN), "linformer:keys=8", layers="1", size=(140, 112), below_breakeven="keep")
    assert [str(site.spec) for site in find_slots(ours)] == ["None", "linformer:keys=8", "None", "None"]
    assert ours(torch.randn(1, 3, 140, 112)).shape == (1, 7)
    wider = convert(ours, "linformer:keys=8", layers="1", size=(112, 140), below_breakeven="keep")
    assert wider(torch.randn(1, 3, 112, 140)).shape == (1, 7)


@pytest.mark.parametrize("name", ["pvt_v2_b0", "xcit_nano_12_p16_224"])
def test_saved_and_loaded(name: str, tmp_path) -> None:
    model = timm.create_model(name, num_classes=5).eval()
    ours = convert(model, "linformer:keys=8", layers="0,2", below_breakeven="keep")
    save(ours, tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors")
    assert type(loaded) is type(model)
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(loaded(x), ours(x))


def test_one_built_otherwise_than_by_its_name_cannot_be_saved(tmp_path) -> None:
    with pytest.raises(UserError, match="xcit_nano_12_p16_224 has 12 layers, not 2"):
        save(build(XCIT), tmp_path / "m.safetensors")
    model = timm.create_model("pvt_v2_b0")
    model.head_drop = nn.ReLU()
    with pytest.raises(UserError, match=r"cannot be saved: it is not pvt_v2_b0 any more: head_drop is ReLU\(\)"):
        save(model, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


PYRAMIDS = {
    "fair": {"attention": "full/window:size=2"},
    "pvt": {"positions": "learned", "class_token": True, "embedding": "patch", "mlp_ratios": (8, 4)},
    "pvt v2": {"embedding": "overlap", "positions": "none", "mlp": "conv_relu", "stage_norms": True, "qkv_bias": False},
    "twins": {"embedding": "patch", "positions": "conv", "mlp": "conv", "norm_eps": 1e-5, "in_chans": 1},
}


@pytest.mark.parametrize("arguments", PYRAMIDS.values(), ids=PYRAMIDS)
def test_our_pyramids_convert_resize_save_and_load(arguments: dict, tmp_path) -> None:
    small = {"embed_dims": (16, 32), "depths": (1, 2), "num_heads": (1, 2), "num_classes": 3, "img_size": 32}
    model = Pyramid(**{**small, **arguments}).eval()
    ours = convert(model, "linformer:keys=4/full", size=(48, 40), below_breakeven="keep")
    assert ours.attention == "linformer:keys=4/full"
    save(ours, tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors")
    x = torch.randn(1, arguments.get("in_chans", 3), 48, 40)
    with torch.no_grad():
        assert torch.equal(loaded(x), ours(x))
