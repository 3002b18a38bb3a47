"""What a conversion tells: layers that stayed full and from which size it pays, random weights, what comes next."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn

from attendless import UserError
from attendless.attention import Grid, registry
from attendless.attention.full import Full
from attendless.convert import convert, convert_with_report, open_model, save
from attendless.convert.files import read_header
from attendless.convert.report import folded
from attendless.convert.source import random_weights
from attendless.integrations.resize import resize
from attendless.measure.macs import REST, count_by_running, layer_costs
from attendless_cli.main import main

NAME = "columnar_micro_patch4_32"
#: As many averages as there are tokens at 32 px: that does not pay there.
WASTE = "linformer:keys=65"


def small(**arguments: object) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **{"img_size": 32, "depth": 1, "num_classes": 5, **arguments})


# Nothing converted ---------------------------------------------------------------------------------------------------


def test_nothing_converted_says_why_and_from_which_size_it_pays() -> None:
    model = timm.create_model(NAME)
    _, report = convert_with_report(model, WASTE)
    size = report.pays_from
    assert size is not None
    line = next(line for line in report.summary() if line.startswith("nothing was converted"))
    assert f"{WASTE} does not pay at 32 px" in line
    assert line.endswith(
        f"it should pay from {size} px; token merging, such as tome:r=8, may pay: `attendless bench` measures it"
    )
    assert f"0 of {len(model.blocks)} layers converted, {len(model.blocks)} left full at 32 px" in report.summary()[1]
    # It is the size from which the same rule converts.
    assert convert(model, WASTE, size=size).attention == WASTE
    assert convert(model, WASTE, size=size - 4).attention == "full"


def test_what_never_pays_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Costly(Full):
        name = "costly"

        def extra_macs(self, grid: Grid) -> int:
            return 1

    monkeypatch.setitem(registry._ATTENTIONS, "costly", Costly)
    _, report = convert_with_report(small(), "costly")
    assert report.pays_from is None
    assert report.summary()[2].endswith(
        "; nor at any size up to 2048 px; token merging, such as tome:r=8, may pay: `attendless bench` measures it"
    )
    _, report = convert_with_report(small(), "costly", below_breakeven="keep")
    assert not any("nothing was converted" in line for line in report.summary())


# Tables --------------------------------------------------------------------------------------------------------------


def test_layers_that_say_the_same_are_one_row() -> None:
    rows = [("embedding", "x"), *((f"blocks.{i}", "full" if i < 3 else "foveal") for i in range(5)), ("head", "x")]
    shown = [("embedding", "x"), ("blocks.0–2", "full"), ("blocks.3–4", "foveal"), ("head", "x")]
    assert folded(rows) == shown
    stages = [(f"layers.{i}.blocks.{j}", "x") for i in range(2) for j in range(2)]
    assert folded(stages) == [("layers.0.blocks.0–1", "x"), ("layers.1.blocks.0–1", "x")]
    assert folded([("embedding", "x"), ("head", "x")]) == [("embedding", "x"), ("head", "x")]


def test_the_tables_of_convert_and_info_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = convert_with_report(small(depth=4), "axial", layers="1:", below_breakeven="keep")
    assert "blocks.1–2 " in str(report)
    assert main(["info", NAME]) == 0
    printed = capsys.readouterr().out
    assert f"blocks.0–{len(timm.create_model(NAME).blocks) - 1} " in printed
    assert "show the figures of one of them" in printed


@pytest.mark.parametrize("name", ["pvt_v2_b0", "xcit_nano_12_p16_224"])
def test_info_counts_timms_other_models_in_their_own_shape(name: str, tmp_path: Path) -> None:
    out = tmp_path / "info.json"
    assert main(["info", name, "--size", "64", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    model = open_model(name, size=64)
    assert row["attention"].startswith("timm's ")
    assert row["macs"]["total"] == count_by_running(model, (64, 64)).total
    assert row["params"] == sum(weight.numel() for weight in model.parameters())
    assert row["layers"][-1]["name"] == REST
    assert row["layers"][-1]["macs"]["total"] > 0


def test_what_has_no_formula_is_named() -> None:
    with pytest.raises(UserError, match="ResNet has no formulas for its layers: it can only be counted by running it"):
        layer_costs(timm.create_model("test_resnet"))


# Weights and answers -------------------------------------------------------------------------------------------------


def test_random_weights_are_said_and_remembered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again, sound = (str(tmp_path / f"{name}.safetensors") for name in ("out", "again", "sound"))
    words = ["--attention", "axial", "--below-breakeven", "keep", "--out"]
    assert main(["convert", NAME, *words, out, "--json", str(tmp_path / "c.json")]) == 0
    printed = capsys.readouterr().out
    assert "the weights are random" in printed
    assert f"  attendless bench {out}" in printed
    assert "attendless eval" not in printed
    assert json.loads((tmp_path / "c.json").read_text())["random_weights"] is True
    assert read_header(out)["conversion"]["random_weights"] is True
    assert main(["convert", out, *words, again]) == 0
    assert "the weights are random" in capsys.readouterr().out
    assert random_weights(again)
    save(timm.create_model(NAME), tmp_path / "weights.safetensors")
    assert main(["convert", NAME, "--weights", str(tmp_path / "weights.safetensors"), *words, sound]) == 0
    printed = capsys.readouterr().out
    assert "weights are random" not in printed
    assert f"  attendless eval {sound} --data DIR" in printed
    assert not random_weights(sound)


def test_outputs_are_compared_on_images_or_it_says_that_noise_says_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        Image.new("RGB", (40, 40), (80 * i, 10, 200)).save(tmp_path / f"{i}.png")
    words = ["convert", NAME, "--attention", "axial"]
    assert main([*words, "--check"]) == 0
    printed = capsys.readouterr().out
    assert "outputs on 4 images of noise: " in printed
    assert "noise says little" in printed
    assert main([*words, "--data", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "outputs on 3 images: " in printed
    assert "noise" not in printed


def test_a_difference_of_no_numbers_is_an_error() -> None:
    model = small()
    nn.init.constant_(model.head.weight, 1e38)
    nn.init.constant_(model.norm.bias, 1e10)
    with pytest.raises(UserError, match="the original model computes no numbers: its output holds NaN or infinity"):
        convert_with_report(model, "full", check=torch.randn(2, 3, 32, 32))


# Sizes and pretrained weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "nearest"),
    [((390, 390), "nearest are 384 and 400"), ((225, 320), "are 224x320 and 240x320"), ((8, 8), "nearest is 16")],
)
def test_a_size_that_does_not_fit_names_those_that_do(size: tuple[int, int], nearest: str) -> None:
    with pytest.raises(UserError, match=rf"{size[0]}x{size[1]} is not a whole number of 16x16 patches: .*{nearest}$"):
        resize(small(), size)


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, and nothing kept from the last time."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))


@pytest.mark.usefixtures("nobody_answers")
def test_without_a_network_pretrained_fails_and_names_the_way_out() -> None:
    with pytest.raises(UserError, match=r"weights of 'deit_tiny_patch16_224' could not be fetched: .*--weights"):
        open_model("deit_tiny_patch16_224", pretrained=True)
    with pytest.raises(UserError, match=f"No pretrained weights exist for {NAME}"):
        open_model(NAME, pretrained=True)


@pytest.mark.slow  # depends on real time
@pytest.mark.usefixtures("nobody_answers")
def test_without_a_network_pretrained_fails_within_seconds() -> None:
    began = time.monotonic()
    with pytest.raises(UserError):
        open_model("deit_tiny_patch16_224", pretrained=True)
    assert time.monotonic() - began < 15


@pytest.mark.usefixtures("nobody_answers")
def test_pretrained_with_weights_uses_the_file(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224")
    save(model, tmp_path / "w.safetensors")
    opened = open_model("vit_tiny_patch16_224", pretrained=True, weights=tmp_path / "w.safetensors")
    assert torch.equal(opened.head.weight, model.head.weight)
