"""Accuracy: statistics against the textbook, images that cannot be read, labels that must be mapped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from attendless import UserError
from attendless.data.folders import Files
from attendless.data.opening import open_data
from attendless.measure.accuracy import evaluate, label_map, paired_difference, wilson
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


def test_limit_spreads_over_the_set(folder: Path) -> None:
    dense = ReadsTheColour()
    assert evaluate(dense, {"full": dense}, open_data(folder), to_tensor, workers=0, limit=3)["full"].images == 3


def test_label_maps() -> None:
    def source(*names: str) -> Files:
        return Files("", (), (), names)

    assert label_map(source("n01440764", "n02102040", "n03888257"), 1000) == [0, 217, 701]
    assert label_map(source("a", "b"), 2) == [0, 1]
    assert label_map(source(), 1000) == []
    with pytest.raises(UserError, match="the images have 2 classes and the model 1000"):
        label_map(source("cat", "dog"), 1000)
    with pytest.raises(UserError, match="n99999999"):
        label_map(source("n99999999"), 1000)


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


def test_eval_verb(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "2" / "broken.png").write_bytes(b"")
    with pytest.raises(SystemExit) as stop:
        main(["eval", "test_vit", "--data", str(folder), "--attention", "full"])
    assert stop.value.code == 2
    assert "3 classes and the model 1000" in capsys.readouterr().err
    out = tmp_path / "eval.json"
    words = ["eval", "test_vit", "--data", str(folder / "2"), "--attention", "full", "window", "--workers", "0"]
    assert main([*words, "--json", str(out)]) == 1  # a picture could not be read
    captured = capsys.readouterr()
    assert "broken.png" in captured.err
    rows = json.loads(out.read_text())["rows"]
    assert [row["attention"] for row in rows] == ["full", "window"]
    assert rows[0]["agreement"] == 1
    assert {"images", "top1", "top5", "top1_ci", "agreement", "skipped", "throughput", "macs"} <= set(rows[0])
