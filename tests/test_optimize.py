"""optimize: every variant judged against the original and timed where it runs; a folder that other commands take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import attendless
import steady_clock
from attendless import UserError
from attendless.export import open_runner
from attendless.export.folder import deployed, manifest
from attendless.measure import precision as precisions
from attendless.optimize import selection, session
from attendless.optimize.candidates import Change
from attendless.optimize.goals import Goal
from attendless.optimize.judge import UNCHANGED, Judgement
from attendless.optimize.optimize import evenly, optimize
from attendless.optimize.pace import Pace, seconds_of
from attendless.optimize.scoring import Scoring, cosine
from attendless.optimize.session import LATE, grouped
from attendless.optimize.variants import EAGER, Target, targets
from attendless_cli.main import main

NAME = "columnar_micro_patch4_32"
QUICK: dict[str, Any] = {"quick": True, "budget": "2s", "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def steady() -> Iterator[None]:
    """Latencies that follow from the names of variants: a choice does not depend on the load of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        steady_clock.install(patch.setattr)
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = attendless.open_model(NAME, num_classes=3)
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(18, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, model: nn.Module) -> Path:
    """Labelled images, and a saved model."""
    place = tmp_path_factory.mktemp("optimize")
    draws = np.random.default_rng(0)
    for i in range(18):
        path = place / "photos" / str(i % 3) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    attendless.save(model, place / "model.safetensors")
    return place


# The search ----------------------------------------------------------------------------------------------------------


def test_the_unmodified_model_takes_part_in_every_runtime(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    found = optimize(model, images, max_drop=100.0, runtimes=["eager", "onnx"], precisions=["fp32"], **QUICK)
    unmodified = [c.target for c in found.outcomes if not c.variant.change]
    assert unmodified == [EAGER, Target("onnx")]
    assert found.outcomes[0].judged == UNCHANGED
    assert found.chosen.target == Target("onnx")
    assert found.chosen.variant.change.tokens
    assert steady_clock.TIMED.count(str(found.chosen.variant)) == 2, "finalists are timed together once more"
    assert found(images[:2]).shape == (2, 3)
    file = found.save(tmp_path / "fast")
    assert file.is_file()
    assert "attendless" in json.loads((tmp_path / "fast" / "manifest.json").read_text())["stamp"]


def test_without_room_for_a_drop_nothing_that_differs_is_chosen(model: nn.Module, images: Tensor) -> None:
    found = optimize(model, images, min_agreement=1.0, runtimes=["eager"], tokens="rank", **QUICK)
    assert found.chosen.agreement == 1.0
    assert {c.target.runtime for c in found.outcomes} == {"eager"}


def test_with_labels_the_final_drop_is_the_paired_difference(model: nn.Module, images: Tensor) -> None:
    with torch.inference_mode():
        labels = model(images).argmax(-1)
    found = optimize(model, images, labels, max_drop=100.0, runtimes=["eager"], **QUICK)
    if found.accuracy is not None:
        before, after = found.accuracy
        assert before == 100.0
        assert found.fresh.expected_drop == pytest.approx(before - after)
    assert found.scored_by == "accuracy drop in percentage points"


def test_a_search_proposes_schedules_and_resumes(
    model: nn.Module, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {
        "max_drop": 100.0,
        "runtimes": ["eager"],
        "attention": "none",
        "budget": "20s",
        "threads": 1,
    }
    found = optimize(model, images, resume=tmp_path, **asked)
    assert any(c.variant.change.tokens.startswith("rank:r=") for c in found.outcomes)
    monkeypatch.setattr(session, "benchmark", lambda *given: pytest.fail("timed again"))
    again = optimize(model, images, resume=tmp_path, **asked)
    assert again.chosen == found.chosen
    assert again.fresh == found.fresh


def test_ctrl_c_returns_the_best_so_far(model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(selection, "proposals", interrupted)
    found = optimize(model, images, max_drop=1.0, runtimes=["onnx"], precisions=["fp32"], **QUICK)
    assert "interrupted: the best variant so far" in found.notes
    assert not found.chosen.variant.change


def test_a_model_that_cannot_be_converted_is_still_served(images: Tensor, tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=3).eval()
    larger = torch.nn.functional.interpolate(images, 160)
    found = optimize(model, larger, runtimes=["eager"], **QUICK)
    assert any("attention and tokens were not searched" in note for note in found.notes)
    assert found.chosen.variant.target == EAGER
    assert found.chosen.latency_ms > 0
    assert found.save(tmp_path / "fast").name == "model.pt2", "no checkpoint: it could not be opened"
    run = open_runner(tmp_path / "fast")
    assert run.runtime == manifest(tmp_path / "fast")["runtime"] == "pt2"
    torch.testing.assert_close(run(larger[:1]), found(larger[:1]))


def test_what_is_refused(model: nn.Module, images: Tensor) -> None:
    for wrong, says in (
        ({"max_drop": 1.0, "target_ms": 2.0}, "max_drop or target_ms, not both"),
        ({"min_agreement": 1.5}, "min_agreement=1.5"),
        ({"budget": "soon"}, "expected a time such as 90s"),
        ({"runtimes": ["onx"]}, "unknown runtime 'onx'"),
        ({"precisions": ["int4"]}, "unknown precision 'int4'"),
        ({"labels": [1, 2]}, "2 labels for 18 images"),
        ({"min_agreement": 0.9, "metric": cosine}, "counts predicted classes, and a metric replaces them"),
        (
            {"runtimes": ["eager"], "precisions": ["int8"]},
            "nothing can run in int8 here: eager int8: eager has no int8",
        ),
    ):
        with pytest.raises(UserError, match=says):
            optimize(model, images, **wrong)


# Parts ---------------------------------------------------------------------------------------------------------------


def test_bf16_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions, "instructions", lambda: frozenset({"avx2"}))
    found, reasons = targets(["openvino"], None)
    assert Target("openvino", "bf16") not in found
    assert reasons == ["openvino bf16: this CPU has no bf16 instructions"]
    monkeypatch.setattr(precisions, "instructions", lambda: frozenset({"avx512_bf16"}))
    assert Target("openvino", "bf16") in targets(["openvino"], None)[0]


def test_budgets_and_their_pace() -> None:
    assert [seconds_of(text) for text in ("90", "90s", "15m", "1h", 2.5)] == [90, 90, 900, 3600, 2.5]
    slow, fast = Pace.of(600, 0.1, False), Pace.of(600, 0.01, False)
    assert slow.choosing < fast.choosing
    assert slow.search < fast.search == 64
    assert evenly(torch.arange(10), 4).tolist() == [0, 2, 5, 7]


def test_scores_of_a_metric_are_paired() -> None:
    outputs = torch.eye(4)
    scoring = Scoring(None, cosine).against(outputs)
    judged = scoring.judge(outputs, scoring.read(outputs.roll(1, 0), outputs))
    assert (judged.expected_drop, judged.agreement) == (100.0, 0.0)
    with pytest.raises(UserError, match="the metric returned 1 values for 4 images"):
        Scoring(None, lambda out, target: torch.zeros(1)).read(outputs, outputs)


def test_an_agreement_is_a_goal() -> None:
    goal = Goal(min_agreement=0.9)
    low = Judgement(100, 0.85, (0.77, 0.91), 0.0, (0.0, 0.0))
    assert goal.bound == pytest.approx(10.0)
    assert "do not show whether the top-1 agreement is at least 90 %" in goal.doubt(low, 200)
    assert not goal.doubt(Judgement(1000, 0.99, (0.98, 0.995), 0.0, (0.0, 0.0)), 2000)


def test_a_doubt_asks_for_time_where_there_are_images_enough() -> None:
    few = Judgement(100, 0.97, (0.92, 0.99), 0.5, (0.1, 2.0))
    assert "a longer budget judges more of the 2000" in Goal(1.0).doubt(few, 6000, 2000)
    assert "about 3,000 images in total are needed" in Goal(1.0).doubt(few, 300, 100)


def test_variants_without_time_share_a_note() -> None:
    assert grouped(["a", f"{LATE}x", "a", f"{LATE}y"]) == ("a", f"{LATE}x; y")


def test_names_of_changes() -> None:
    assert str(Change("full")) == "full"
    assert str(Change("full", (), "rank:keep=0.5")) == "rank:keep=0.5"
    assert str(Change("foveal", (0, 2), "rank:r=4")) == "foveal in layers 0, 2 with rank:r=4"


# The command and its folder ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(photos: Path) -> Path:
    words = ["optimize", str(photos / "model.safetensors"), "--data", str(photos / "photos"), "--out"]
    words += [str(photos / "fast"), "--max-drop", "100", "--quick", "--budget", "2s", "--threads", "1"]
    words += ["--runtime", "onnx", "--precision", "fp32", "--json", str(photos / "found.json")]
    assert main(words) == 0
    return photos / "fast"


def test_the_folder_is_whole(folder: Path) -> None:
    found = manifest(folder)
    assert {"model.onnx", "manifest.json", "report.html"} <= {file.name for file in folder.iterdir()}
    assert found["runtime"] == "onnx"
    assert found["goal"] == {"max_drop": 100.0}
    assert found["command"].startswith("attendless optimize ")
    assert found["preprocessing"]["input_size"] == [3, 32, 32]
    assert found["variants"][0]["unmodified"]
    page = (folder / "report.html").read_text()
    assert all(text in page for text in ("open_runner(", "Contribution of each step", "<polyline"))
    assert not [file for file in folder.parent.iterdir() if file.name.startswith(".fast") or file.suffix == ".work"]
    rows = json.loads((folder.parent / "found.json").read_text())["rows"]
    assert {row["runtime"] for row in rows} == {"eager", "onnx"}


def test_other_commands_take_the_folder(folder: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_runner(folder)
    assert run.runtime == "onnx"
    assert run(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    picture = str(next((photos / "photos").rglob("*.png")))
    assert main(["predict", str(folder), picture, "--topk", "1"]) == 0
    assert main(["eval", str(folder), "--data", str(photos / "photos")]) == 0
    assert main(["bench", str(folder), "--budget", "0.2", "--threads", "1"]) == 0
    assert "onnx" in capsys.readouterr().out


def test_a_folder_of_somebody_else_is_not_replaced(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(SystemExit):
        main(["optimize", str(photos / "model.safetensors"), "--data", str(photos / "photos"), "--out", str(tmp_path)])
    assert "that attendless did not write" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "mine"


def test_damaged_manifests_are_named(tmp_path: Path) -> None:
    assert deployed(tmp_path) is None
    for text, says in (
        ("{", "cannot be read"),
        ('{"format": 99, "file": "a", "runtime": "b", "precision": "c"}', "of format 99"),
        ('{"format": 1, "file": "../a", "runtime": "b", "precision": "c"}', "not in the folder"),
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=says):
            deployed(tmp_path)
