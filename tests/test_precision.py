"""One option for the precision, wherever a model runs; combinations that do not exist are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attendless
from attendless.errors import UserError
from attendless.export import as_runner, export, open_runner
from attendless.export.checks import compare_bf16
from attendless.export.description import describe
from attendless.export.exporting import floats_of
from attendless.export.features import outputs_of
from attendless.measure import precision
from attendless.measure.runtime import find_runtimes, in_precisions, split_precision
from attendless_cli.main import main

NAME = "columnar_micro_patch4_32"


@pytest.fixture
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that computes bf16, by its flags; PyTorch computes it on any."""
    monkeypatch.setattr(precision, "instructions", lambda: frozenset({"avx512_bf16"}))


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "instructions", lambda: frozenset({"avx2"}))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    for i in range(6):
        path = tmp_path / "photos" / str(i % 3) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


def test_names_of_runtimes_may_end_in_a_precision(with_bf16: None) -> None:
    assert split_precision("openvino-int8") == ("openvino", "int8")
    assert split_precision("onnx-kernels") == ("onnx-kernels", "fp32")
    assert [one.name for one in find_runtimes(["eager", "eager-bf16"])] == ["eager", "eager-bf16"]


def test_every_runtime_gets_the_precisions_that_it_has() -> None:
    found = in_precisions(["eager", "openvino"], ["fp32", "int8"])
    assert found == ["eager", "openvino", "openvino-int8"]
    assert in_precisions(["eager"], ["fp32", "int8"]) == ["eager", "eager-int8"], "left in to be refused by name"
    assert in_precisions(["eagre"], ["int8"]) == ["eagre-int8"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("eager-bf16", "this CPU has no bf16 instructions"),
        ("eager-int8", "eager has no int8: it computes in fp32 or bf16"),
        ("onnx-bf16", "onnx has no bf16: it computes in fp32 or int8"),
        ("pt2-int8", "pt2 has no int8"),
    ],
)
def test_what_does_not_exist_is_refused(without_bf16: None, name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        find_runtimes([name])


def test_eager_bf16_rounds(with_bf16: None) -> None:
    model = attendless.open_model(NAME).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plain, rounded = as_runner(model)(images), as_runner(model, precision="bf16")(images)
    assert rounded.dtype == torch.float32
    assert 0 < float((plain - rounded).abs().max()) < 0.1 * float(plain.abs().max())
    assert next(model.parameters()).dtype == torch.float32, "the model itself stays"
    assert as_runner(model, precision="bf16").description.precision == "bf16"


def test_a_bf16_file_is_compared_by_its_median(with_bf16: None) -> None:
    model = attendless.open_model(NAME).eval()
    about, outputs = describe(model, batch=2), outputs_of(model)
    assert "in bf16 the outputs of 6 images differ by" in compare_bf16(
        as_runner(model, precision="bf16").run, outputs, about
    )
    with pytest.raises(UserError, match="in bf16 the export does not compute what the model does"):
        compare_bf16(lambda images: (torch.zeros(len(images), 1000),), outputs, about)


def test_the_float_part_of_int8_is_bf16_where_that_is_fast(with_bf16: None) -> None:
    assert floats_of("openvino", "int8") == floats_of("openvino", "bf16") == "bf16"
    assert (floats_of("openvino", "fp32"), floats_of("onnx", "int8")) == ("fp32", "fp32")


def test_export_says_what_it_computes_in(without_bf16: None, tmp_path: Path) -> None:
    model = attendless.open_model(NAME)
    found = export(model, tmp_path / "fast.onnx", precision="fp32", measure=False)
    assert (found.as_dict()["precision"], open_runner(found.path).description.precision) == ("fp32", "fp32")
    with pytest.raises(UserError, match="computes in fp32, not in int8"):
        open_runner(found.path, precision="int8")
    for wrong, says in (
        ({"precision": "bf16"}, "onnx has no bf16"),
        ({"precision": "int4"}, "unknown precision 'int4'"),
        ({"precision": "bf16", "int8": True}, "give one of the two"),
        ({"precision": "int8"}, "int8 is calibrated on images"),
    ):
        with pytest.raises(UserError, match=says):
            export(model, tmp_path / "other.onnx", **wrong)
    with pytest.raises(UserError, match="this CPU has no bf16 instructions"):
        export(model, tmp_path / "other.xml", precision="bf16")


def test_bench_compares_precisions(with_bf16: None, tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    words = ["bench", NAME, "--precision", "fp32", "bf16", "--budget", "0.1", "--threads", "1", "--json", str(target)]
    assert main(words) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [(row["runtime"], row["precision"]) for row in rows] == [("eager", "fp32")] * 2 + [("eager", "bf16")] * 2


def test_bench_times_int8(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    words = ["bench", NAME, "--runtime", "onnx", "--precision", "int8", "--budget", "0.1", "--json", str(target)]
    assert main(words) == 0
    rows = json.loads(target.read_text())["rows"]
    assert {(row["runtime"], row["precision"]) for row in rows} == {("onnx", "int8")}


def test_eval_and_predict_in_bf16(with_bf16: None, photos: Path, tmp_path: Path) -> None:
    target = tmp_path / "row.json"
    words = ["eval", NAME, "--data", str(photos), "--no-labels", "--precision", "bf16", "--json", str(target)]
    assert main(words) == 0
    (row,) = json.loads(target.read_text())["rows"]
    assert (row["precision"], row["runtime"]) == ("bf16", "eager")
    assert main(["predict", NAME, str(next(photos.rglob("*.png"))), "--precision", "bf16"]) == 0
