"""`eval` and `bench` measure exported files in their own runtime, beside the original model where it is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import attendless
from attendless.errors import UserError
from attendless.export import export, open_runner
from attendless.export.file_model import open_file_model, original_of
from attendless_cli.main import main

NAME, SPEC = "columnar_micro_patch4_32", "foveal:keep=0.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, exports of it to every runtime, an export by name, and images in folders named by class index."""
    place = tmp_path_factory.mktemp("measured")
    torch.manual_seed(0)
    model = attendless.open_model(NAME, attention=SPEC, below_breakeven="keep", num_classes=3)
    attendless.save(model, place / "fast.safetensors")
    for suffix in ("onnx", "xml", "pt2"):
        export(
            place / "fast.safetensors", place / f"fast.{suffix}", measure=False, batch=None if suffix == "pt2" else 1
        )
    export(NAME, place / "named.pt2", measure=False, attention=SPEC, below_breakeven="keep")
    draws = np.random.default_rng(0)
    for i in range(12):
        path = place / "images" / str(i % 3) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    return place


def row_of(words: list[Any], folder: Path) -> dict[str, Any]:
    target = folder / "row.json"
    assert main([*map(str, words), "--json", str(target)]) in (0, None)
    (row,) = json.loads(target.read_text())["rows"]
    return row


@pytest.mark.parametrize(("suffix", "runtime"), [("onnx", "onnx"), ("xml", "openvino"), ("pt2", "pt2")])
def test_eval_measures_the_file_beside_the_original(
    folder: Path, suffix: str, runtime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = row_of(["eval", folder / f"fast.{suffix}", "--data", folder / "images"], folder)
    assert (row["runtime"], row["precision"], row["attention"], row["images"]) == (runtime, "fp32", SPEC, 12)
    saved = row_of(["eval", folder / "fast.safetensors", "--data", folder / "images"], folder)
    assert (saved["runtime"], saved["precision"]) == ("eager", "fp32")
    for key in ("top1", "top5", "agreement", "difference"):
        assert row[key] == pytest.approx(saved[key])
    assert f"{runtime} · fp32" in capsys.readouterr().out


def test_eval_says_why_there_is_no_original(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of(["eval", folder / "named.pt2", "--data", folder / "images", "--no-labels"], folder)
    assert row["agreement"] is row["difference"] is None
    assert f"the weights of {NAME} are not known: give --weights F" in capsys.readouterr().out


def test_eval_refuses_what_an_exported_file_cannot_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", str(folder / "fast.pt2"), "--data", str(folder / "images"), "--attention", "full"])
    assert "is exported and takes no other attention" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["onnx", "xml", "pt2"])
def test_bench_times_the_file_beside_the_original(folder: Path, suffix: str) -> None:
    row = row_of(["bench", folder / f"fast.{suffix}", "--budget", "0.2", "--threads", "1"], folder)
    assert (row["runtime"], row["precision"]) == ({"xml": "openvino"}.get(suffix, suffix), "fp32")
    assert min(row["latency_ms"], row["dense_latency_ms"], row["speedup"], row["pairs"]) > 0


def test_bench_builds_a_named_original(folder: Path) -> None:
    assert row_of(["bench", folder / "named.pt2", "--budget", "0.1"], folder)["speedup"] > 0


def test_bench_says_why_there_is_no_original(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(attendless.load(folder / "fast.safetensors"), folder / "lost.pt2", measure=False, name="hf-hub:someone/vit")
    row = row_of(["bench", folder / "lost.pt2", "--budget", "0.1"], folder)
    assert row["speedup"] is row["dense_latency_ms"] is None
    assert row["latency_ms"] > 0
    assert "neither a registered model nor a file here" in row["verdict"]
    assert "not compared: " in capsys.readouterr().out


def test_bench_refuses_another_batch(folder: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", str(folder / "fast.onnx"), "--batch", "2"])


def test_a_saved_file_that_is_another_model_now_is_not_the_original(folder: Path, tmp_path: Path) -> None:
    about = open_file_model(folder / "fast.pt2").description
    path = tmp_path / "other.safetensors"
    attendless.save(attendless.open_model(NAME, num_classes=3), path)
    found, why = original_of(dataclasses.replace(about, model=str(path)))
    assert found is None
    assert "is another model now" in why


@pytest.mark.parametrize("suffix", ["onnx", "xml", "pt2", "safetensors"])
def test_runners_take_arrays(folder: Path, suffix: str) -> None:
    run = open_runner(folder / f"fast.{suffix}")
    array = np.random.default_rng(0).standard_normal((1, 3, 32, 32))
    expected = run(torch.from_numpy(array).float())
    array.setflags(write=False)
    for given in (array, array.astype(np.float32), array.astype(np.float32).transpose(0, 1, 3, 2)[:, :, ::-1]):
        assert run(given).shape == expected.shape
    torch.testing.assert_close(run(array), expected)


def test_runners_refuse_other_images(folder: Path) -> None:
    run = open_runner(folder / "fast.pt2")
    with pytest.raises(UserError, match=r"images of torch\.uint8 were given: expected floats, normalised"):
        run(np.zeros((1, 3, 32, 32), dtype=np.uint8))
    with pytest.raises(UserError, match="images were given as list: expected a tensor or a NumPy array"):
        run([[1.0]])  # type: ignore[arg-type]
