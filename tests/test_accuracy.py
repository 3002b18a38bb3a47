"""Accuracy: statistics against the textbook, images that cannot be read, labels that must be mapped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models.swin_transformer import SwinTransformer
from torch import nn

import attendless
from attendless import UserError
from attendless.data.labels import NO_LABELS
from attendless.data.opening import open_data
from attendless.measure.accuracy import evaluate, paired_difference, spread, wilson
from attendless_cli.eval import variants
from attendless_cli.main import main

COLOURS = {"0": (250, 10, 10), "1": (10, 250, 10), "2": (10, 10, 250)}


class ReadsTheColour(nn.Module):
    """Right about everything; `wrong_on` images of class 0 it calls class 1."""

    num_classes = 3

    def __init__(self, blind: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.blind = blind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x.mean((2, 3))
        return logits * torch.tensor([0.0, 1.0, 1.0]) if self.blind else logits


def to_tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture.resize((4, 4)))).permute(2, 0, 1) / 255


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        for i in range(4):
            path = tmp_path / "data" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), colour).save(path)
    return tmp_path / "data"


def test_counts_pairs_and_agreement(folder: Path) -> None:
    dense, blind = ReadsTheColour(), ReadsTheColour(blind=True)
    found = evaluate(dense, {"full": dense, "blind": blind}, open_data(folder), to_tensor, batch=5, workers=0)
    assert found["full"].top1 == 100
    assert found["full"].agreement == 1
    assert found["full"].difference == 0
    assert found["blind"].top1 == pytest.approx(100 * 8 / 12)
    assert found["blind"].agreement == pytest.approx(8 / 12)
    assert found["blind"].difference == pytest.approx(-100 * 4 / 12)
    assert found["blind"].top5 == 100
    low, high = found["blind"].difference_ci
    assert low < -33 < high < 0


def test_unreadable_images_are_told_and_skipped(folder: Path) -> None:
    (folder / "1" / "broken.png").write_bytes(b"not a picture")
    dense, told = ReadsTheColour(), []
    found = evaluate(dense, {"full": dense}, open_data(folder), to_tensor, workers=0, on_skip=told.append)
    assert (found["full"].images, found["full"].skipped) == (12, 1)
    assert "broken.png" in told[0]


def test_images_without_labels_measure_agreement_alone(folder: Path) -> None:
    dense, blind = ReadsTheColour(), ReadsTheColour(blind=True)
    found = evaluate(dense, {"blind": blind}, open_data(folder / "0"), to_tensor, workers=0)["blind"]
    assert found.top1 is None
    assert found.difference is None
    assert found.agreement == 0


def test_labels_can_be_left_out(folder: Path) -> None:
    dense = ReadsTheColour()
    found = evaluate(dense, {"full": dense}, open_data(folder), to_tensor, workers=0, labels=NO_LABELS)["full"]
    assert (found.images, found.top1, found.agreement) == (12, None, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_answer_that_is_no_number_is_an_error(folder: Path, bad: float) -> None:
    """NaN agrees with NaN, so a broken model would be called faithful."""

    class Breaks(ReadsTheColour):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = super().forward(x)
            return torch.where(logits.argmax(1, keepdim=True) == 1, bad, logits)  # only on green

    dense = ReadsTheColour()
    with pytest.raises(UserError, match=r"^breaks answers image '1/0.png' with NaN or infinity"):
        evaluate(dense, {"breaks": Breaks()}, open_data(folder), to_tensor, batch=3, workers=0)
    with pytest.raises(UserError, match=r"^the baseline answers image '1/0.png'"):
        evaluate(Breaks(), {"full": dense}, open_data(folder), to_tensor, workers=0)


def test_limit_spreads_over_the_set(folder: Path) -> None:
    dense = ReadsTheColour()
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(3, 10) == spread(3, None) == [0, 1, 2]
    assert evaluate(dense, {"full": dense}, open_data(folder), to_tensor, workers=0, limit=3)["full"].images == 3


def test_wilson_against_its_definition() -> None:
    low, high = wilson(70, 100)
    for p in (low, high):  # the ends solve |p̂ − p| = z √(p (1−p) / n)
        assert abs(0.7 - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / 100), rel=1e-6)
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == pytest.approx(1)


def test_paired_difference_counts_only_flips() -> None:
    ours, theirs = [True] * 50 + [False] * 3 + [True] * 1, [True] * 50 + [True] * 3 + [False] * 1
    difference, (low, high) = paired_difference(ours, theirs)
    assert difference == pytest.approx(-2 / 54)
    half = 1.959964 * math.sqrt(4 - 4 / 54) / 54
    assert (low, high) == pytest.approx((difference - half, difference + half))


# As it is typed ------------------------------------------------------------------------------------------------------


def rows_of(words: list[str], out: Path) -> list[dict]:
    main(["eval", *words, "--workers", "0", "--json", str(out)])
    return json.loads(out.read_text())["rows"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["eval", *words])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def test_eval_verb(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "2" / "broken.png").write_bytes(b"")
    out = tmp_path / "eval.json"
    words = ["eval", "test_vit", "--data", str(folder / "2"), "--attention", "full", "window", "--workers", "0"]
    assert main([*words, "--json", str(out)]) == 1  # a picture could not be read
    captured = capsys.readouterr()
    assert "broken.png" in captured.err
    rows = json.loads(out.read_text())["rows"]
    assert [row["attention"] for row in rows] == ["full", "window"]
    assert rows[0]["agreement"] == 1
    assert rows[0]["labels"] == "none"
    assert {"images", "top1", "top5", "top1_ci", "agreement", "skipped", "throughput", "macs"} <= set(rows[0])


def test_a_row_is_called_what_was_measured(folder: Path, tmp_path: Path) -> None:
    """At 32 px foveal costs more than it saves: it is measured all the same, never full attention under its name."""
    dense = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, global_pool="avg")  # it reads every patch
    model = attendless.convert(dense, "full")
    attendless.save(model, tmp_path / "three.safetensors")
    asked = ["full", "2xfull/foveal:keep=0.25", "full/full/foveal", "3xfull"]
    words = [str(tmp_path / "three.safetensors"), "--data", str(folder), "--attention", *asked]
    full, sparse = rows_of(words, tmp_path / "a.json")
    assert (full["attention"], sparse["attention"]) == ("full", "2xfull/foveal"), "as bench and info call it"
    assert sparse["macs"]["core"] > full["macs"]["core"]


def test_a_file_is_measured_as_it_is(folder: Path, tmp_path: Path) -> None:
    dense = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    attendless.save(attendless.convert(dense, "linformer:keys=8", below_breakeven="keep"), tmp_path / "m.safetensors")
    (row,) = rows_of([str(tmp_path / "m.safetensors"), "--data", str(folder)], tmp_path / "a.json")
    assert row["attention"] == "linformer:keys=8"
    assert row["weights"] == str(tmp_path / "m.safetensors")


def test_a_model_of_timms_own_kind_is_not_called_full() -> None:
    swin = SwinTransformer(img_size=32, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 1))
    assert variants(swin, [], [], None) == (swin, {"timm's WindowAttention": swin})
    _, models = variants(swin, ["full"], [], None)  # every token to every other: another model than Swin
    assert models.keys() == {"full"}
    assert models["full"] is not swin


def test_random_weights_are_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of(["test_vit", "--data", str(folder)], tmp_path / "a.json")
    assert row["weights"] == "random"
    printed = capsys.readouterr().out
    assert "full (random weights)" in printed
    assert "say nothing about a trained model" in printed
    weights = tmp_path / "w.safetensors"
    save_file(timm.create_model("test_vit").state_dict(), weights)
    (row,) = rows_of(["test_vit", "--weights", str(weights), "--data", str(folder)], tmp_path / "b.json")
    assert row["weights"] == str(weights)
    assert "random weights" not in capsys.readouterr().out


def test_which_images_a_limit_takes_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of(["test_vit", "--data", str(folder), "--images", "3"], tmp_path / "a.json")
    assert (row["images"], row["of"]) == (3, 12)
    assert "3 images (of 12, evenly spread)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("workers", ["-5", "1.5", "two"])
def test_a_number_of_workers_that_is_none(folder: Path, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    said = refused(["test_vit", "--data", str(folder), "--workers", workers], capsys)
    assert f"{workers!r}: expected a whole number from 0 to" in said
