"""Detection and segmentation on real pictures with real weights: what minutes on a CPU must reach."""

from __future__ import annotations

import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from attendless.train.log import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.data]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    return runpy.run_path(str(folder / "dense.py"), run_name="imported")


def arguments(data: Path, out: Path, only: list[str] | None = None) -> Namespace:
    weights = data / "weights" / "deit_tiny_patch16_224.safetensors"
    return Namespace(weights=weights, pets=data / "pets-256", coco=data / "coco128", out=out, only=only)


def test_pets_are_segmented_and_foveal_loses_little(study: dict[str, Any], data_dir: Path, tmp_path: Path) -> None:
    specs = ["full", "foveal:keep=0.25"]
    study["learn"](arguments(data_dir, tmp_path, specs))
    full, foveal = (
        read_rows(tmp_path / "pets" / study["folder"](spec) / "metrics.jsonl")[-1]["miou"] for spec in specs
    )
    assert full >= 65
    assert foveal >= full - 1.5


def test_sixteen_pictures_are_learned_by_heart(study: dict[str, Any], data_dir: Path, tmp_path: Path) -> None:
    study["overfit"](arguments(data_dir, tmp_path))
    assert read_rows(tmp_path / "coco" / "run" / "metrics.jsonl")[-1]["ap50"] >= 90
