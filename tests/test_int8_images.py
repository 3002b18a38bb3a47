"""int8: calibrated on some images, measured on others, against the original fp32 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import attendless
from attendless.data import open_data
from attendless.data.held_out import hold_out
from attendless.errors import UserError
from attendless.export import export, int8
from attendless.export.description import describe


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("photos")
    draws = np.random.default_rng(0)
    for i in range(30):
        path = place / str(i % 3) / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return place


def names(source: Any) -> list[str]:
    return [source.name(i) for i in range(len(source))]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    named = "columnar_micro_patch4_32"
    return attendless.open_model(named, attention="foveal:keep=0.3", below_breakeven="keep", num_classes=3)


# The split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "held"), [(300, 15), (10, 10), (1, 1)])
def test_the_parts_are_disjoint_and_whole(data: Path, most: int, held: int) -> None:
    source = open_data(data)
    some, others = hold_out(source, most)
    assert (len(some), len(others)) == (held, 30 - held)
    assert sorted(names(some) + names(others)) == sorted(names(source))
    assert some.classes == others.classes == source.classes
    assert [others[i][1] for i in range(3)] == [source[others.indices[i]][1] for i in range(3)]


def test_the_split_is_by_name_wherever_the_folder_is(data: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "photos"
    for path in data.glob("*/*.png"):
        (moved / path.parent.name).mkdir(parents=True, exist_ok=True)
        (moved / path.parent.name / path.name).write_bytes(path.read_bytes())
    here, there = (hold_out(open_data(folder), 10)[0] for folder in (data, moved))
    assert list(here.indices) == list(there.indices)
    assert list(here.indices) != list(range(10)), "not the first ones"


# What is measured ----------------------------------------------------------------------------------------------------


def linear(run: Any) -> int8.Run:
    return lambda images: (run(images),)


def test_accuracy_is_against_the_original_on_other_images(
    data: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    measure = int8.evaluate

    def spy(baseline: nn.Module, runs: Any, source: Any, *more: Any, **how: Any) -> Any:
        seen.update(baseline=baseline, names=names(source))
        return measure(baseline, runs, source, *more, **how)

    monkeypatch.setattr(int8, "evaluate", spy)
    given = int8.images(describe(model), data)
    plain = attendless.convert(model, "full")

    def wrong(images: Tensor) -> tuple[Tensor, ...]:
        return (plain(images).roll(1, 1),)

    found = int8.quality(linear(model), wrong, model, plain, given, None, print)
    assert found is not None
    assert seen["baseline"] is plain
    assert not set(seen["names"]) & set(names(given.calibration))
    assert (found.images, found.calibration_images, found.agreement) == (15, 15, 0.0)
    assert found.original_top1 is not None
    assert found.difference == pytest.approx(found.top1 - found.original_top1)
    assert found.difference_ci[0] <= found.difference <= found.difference_ci[1]
    assert "original fp32 model" in str(found)
    assert "on 15 images, calibrated on 15 others" in str(found)


def test_calibration_images_of_their_own(data: Path, model: nn.Module, tmp_path: Path) -> None:
    for i in range(4):
        Image.new("RGB", (32, 32), (i, 50 * i, 0)).save(tmp_path / f"{i}.png")
    given = int8.images(describe(model, batch=1), data, tmp_path)
    assert len(given.rest) == 30
    assert len(given.batches()) == len(list(given.batches())) == 4
    assert next(iter(given.batches())).shape == (1, 3, 32, 32)


def test_the_same_folder_for_both_is_refused(data: Path, model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--calibration and --data are both"):
        export(model, tmp_path / "fast.onnx", int8=True, data=data, calibration=data)
    with pytest.raises(UserError, match="calibration is for int8"):
        export(model, tmp_path / "fast.onnx", data=data, calibration=tmp_path)


def test_at_most_three_hundred_images_are_read_in_the_files_batches(data: Path, model: nn.Module) -> None:
    assert int8.CALIBRATION == 300
    batches = int8.images(describe(model, batch=4), data).batches()
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert len(int8.images(describe(model, batch=16), data).batches()) == 0
    with pytest.raises(UserError, match="15 images to calibrate on, and the file takes 16 at once"):
        int8.quantise("onnx", Path("none.onnx"), int8.images(describe(model, batch=16), data).batches())
