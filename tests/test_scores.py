"""Scores by a user's metric: targets, pairs, the worst image, and metrics and outputs that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from attendless import UserError
from attendless.data.opening import open_data
from attendless.measure.scores import evaluate_by
from attendless_cli.main import main

GREYS = (40, 120, 200)


class Times(nn.Module):
    """The mean of the image, times a factor."""

    num_classes = 0

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x.mean((2, 3))


def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 - (outputs - targets).abs().mean(1)


def to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture.resize((4, 4)))).permute(2, 0, 1) / 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, grey in enumerate(GREYS):
        path = tmp_path / "data" / str(i) / "one.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (grey,) * 3).save(path)
    return tmp_path / "data"


def test_scores_are_paired_with_the_original(folder: Path) -> None:
    original, half = Times(1.0), Times(0.5)
    found = evaluate_by(closeness, original, {"full": original, "half": half}, open_data(folder), to_tensor, workers=0)
    assert found["full"].mean == 1
    assert found["full"].difference == 0
    scores = [1 - 0.5 * grey / 200 for grey in GREYS]
    assert found["half"].mean == pytest.approx(np.mean(scores))
    assert found["half"].median == pytest.approx(scores[1])
    assert found["half"].worst == pytest.approx(scores[2])
    assert "2" in found["half"].worst_image
    assert found["half"].difference == pytest.approx(np.mean(scores) - 1)


def test_labels_are_the_targets_if_they_are_given(folder: Path) -> None:
    seen: list[list[int]] = []

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.tolist())
        return torch.ones(len(outputs))

    source = open_data(folder)
    evaluate_by(metric, Times(1.0), {"a": Times(2.0)}, source, to_tensor, classes=(7, 8, 9), batch=3, workers=0)
    assert seen == [[7, 8, 9]] * 2


@pytest.mark.parametrize("wrong", [lambda o, t: torch.ones(9), lambda o, t: torch.full((len(o),), torch.nan)])
def test_a_metric_returns_a_finite_score_per_image(folder: Path, wrong: object) -> None:
    with pytest.raises(UserError, match="expected one finite score each"):
        evaluate_by(wrong, Times(1.0), {}, open_data(folder), to_tensor, workers=0)  # type: ignore[arg-type]


def test_outputs_that_are_not_finite_raise(folder: Path) -> None:
    with pytest.raises(UserError, match="bad returns NaN or infinity for image"):
        evaluate_by(closeness, Times(1.0), {"bad": Times(float("inf"))}, open_data(folder), to_tensor, workers=0)


def test_the_command_scores_by_a_metric(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_metric.py").write_text(
        "from torch.nn.functional import cosine_similarity\n\n\ndef cosine(a, b):\n    return cosine_similarity(a, b)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["eval", "columnar_micro_patch4_32", "--data", str(folder), "--no-labels", "--attention", "full", "window"]
    assert main([*words, "--metric", "my_metric:cosine", "--workers", "0", "--json", "rows.json"]) == 0
    full, window = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert full["mean"] == pytest.approx(1)
    assert -1 <= window["worst"] <= window["mean"] <= 1
    with pytest.raises(SystemExit):
        main([*words, "--metric", "my_metric:nothing"])
