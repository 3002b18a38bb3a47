"""Detection and segmentation by the engine of classification: learned, resumed exactly, saved, judged and drawn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import attendless
from attendless import UserError
from attendless.dense import train
from attendless.dense.draw import Found, draw, predict
from attendless.dense.evaluating import evaluate
from attendless.train.log import read_rows
from attendless_cli.main import main
from dense_toys import HEADS, MODEL, RUN, SHORT, TOYS, toy_masks

TASKS = ("detection", "segmentation")


def learn(task: str, data: Path, out: Path, **fields: Any) -> Any:
    return train(MODEL, data, task=task, head=HEADS[task], out=out, run=RUN, **{**SHORT, **fields})


@pytest.fixture(scope="module", params=TASKS)
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A task, its data, and the folder of a short run."""
    root = tmp_path_factory.mktemp(request.param)
    data = TOYS[request.param](root / "data")
    assert learn(request.param, data, root / "run").finished
    return request.param, data, root / "run"


def test_a_run_leaves_what_classification_leaves(learned: tuple[str, Path, Path]) -> None:
    task, _, out = learned
    rows = [row for row in read_rows(out / "metrics.jsonl") if row["event"] == "epoch"]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"detection": "ap", "segmentation": "miou"}[task] in rows[-1]
    assert (out / "curves.png").is_file()
    what = json.loads((out / "recipe.json").read_text())["what"]
    assert (what["task"], what["head"], what["classes"]) == (task, HEADS[task], 2 if task == "detection" else 3)


def test_what_was_left_is_judged_the_same(learned: tuple[str, Path, Path]) -> None:
    task, data, out = learned
    model = attendless.load(out / "last.safetensors")
    last = [row for row in read_rows(out / "metrics.jsonl") if row["event"] == "epoch"][-1]
    found = evaluate(model, data)
    name = {"detection": "ap50", "segmentation": "miou"}[task]
    assert found[name] == pytest.approx(last[name], abs=0.2)
    assert evaluate(model, data, batch=1)[name] == pytest.approx(found[name], abs=1e-3)  # whoever else is in a batch
    assert found["macs"]["total"] > found["macs"]["core"] > 0
    assert found["throughput"] > 0


def test_a_stopped_run_goes_on_bit_for_bit(
    learned: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attendless.train import loop

    task, data, out = learned
    steps = loop.PhaseLoop._step

    def stopping(self: Any, batches: Any, stop: Any) -> Any:
        stop.asked = self.progress.total == 1
        return steps(self, batches, stop)

    monkeypatch.setattr(loop.PhaseLoop, "_step", stopping)
    assert not learn(task, data, tmp_path / "run").finished
    monkeypatch.undo()
    assert learn(task, data, tmp_path / "run").finished
    one, other = (load_file(path / "last.safetensors") for path in (out, tmp_path / "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_learning_goes_on_from_a_file_under_its_head(learned: tuple[str, Path, Path], tmp_path: Path) -> None:
    task, data, out = learned
    file = out / "last.safetensors"
    more = train(file, data, task=task, out=tmp_path / "more", run=RUN, **{**SHORT, "epochs": 1})
    assert more.finished
    other = "segmentation" if task == "detection" else "detection"
    with pytest.raises(UserError, match=f"the model is made for {task}"):
        train(file, TOYS[other](tmp_path / "other"), task=other, out=tmp_path / "wrong", run=RUN)
    with pytest.raises(UserError, match="leave out --weights"):
        train(file, data, task=task, weights=file, out=tmp_path / "wrong", run=RUN)


def test_the_command_line(learned: tuple[str, Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task, data, out = learned
    file = str(out / "best.safetensors")
    words = ["--epochs", "1", "--batch", "4", "--size", "32", "--workers", "0", "--head", HEADS[task]]
    code = main(["train", MODEL, "--task", task, "--data", str(data), "--out", str(tmp_path / "run"), *words])
    assert code == 0
    printed = capsys.readouterr()
    assert f"next: attendless eval {tmp_path}/run/best.safetensors --data {data}" in printed.out
    assert "random weights" in printed.err
    report = tmp_path / "report.json"
    words = ["--attention", "full", "foveal:keep=0.5", "--workers", "0", "--json", str(report)]
    assert main(["eval", file, "--data", str(data), *words]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["attention"] for row in rows] == ["full", "foveal:keep=0.5"]
    assert ("ap50" if task == "detection" else "miou") in capsys.readouterr().out
    for command in (["info", file], ["bench", file, "--quick"], ["convert", file, "--attention", "full"]):
        with pytest.raises(SystemExit, match="2"):
            main(command)
        assert f"holds a model for {task}" in capsys.readouterr().err


def test_predict_draws(learned: tuple[str, Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, data, out = learned
    picture = next(path for path in sorted(data.rglob("*.png")) if "mask" not in str(path))
    others = [tmp_path / name / "same.png" for name in "ab"]
    for other in others:
        other.parent.mkdir()
        shutil.copy(picture, other)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    model, found = str(out / "last.safetensors"), tmp_path / "found"
    words = ["predict", model, *map(str, others), str(tmp_path / "broken.png"), "--out", str(found)]
    assert main([*words, "--json", str(tmp_path / "found.json")]) == 1
    assert "broken.png" in capsys.readouterr().err
    assert sorted(path.name for path in found.iterdir()) == ["same-2.png", "same.png"]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["picture"] for row in rows] == [str(found / "same.png"), str(found / "same-2.png")]
    with Image.open(found / "same.png") as drawn, Image.open(picture) as plain:
        assert drawn.size == plain.size
    with pytest.raises(SystemExit):
        main([*words, "--attention", "full"])
    assert "--attention is for classification" in capsys.readouterr().err


def test_wrong_words_are_answered(learned: tuple[str, Path, Path], tmp_path: Path) -> None:
    task, data, out = learned
    with pytest.raises(UserError, match=f"unknown recipe field of {task} 'mixup'"):
        learn(task, data, tmp_path / "run", mixup=0.5)
    with pytest.raises(UserError, match="holds a different run"):
        learn(task, data, out, lr=0.5)
    with pytest.raises(UserError, match="batch 100 is larger"):
        learn(task, data, tmp_path / "run", batch=100)
    if task == "detection":
        with pytest.raises(UserError, match="for segmentation only"):
            evaluate(attendless.load(out / "last.safetensors"), data, several_scales=True)
    else:
        (data / "classes.txt").write_text("0 other\n1 things\n2 here\n")
        with pytest.raises(UserError, match="the classes of the model and of the data differ: '0', not 'other'"):
            evaluate(attendless.load(out / "last.safetensors"), data)
        (data / "classes.txt").unlink()


def test_pictures_show_what_was_found() -> None:
    image = Image.new("RGB", (120, 80), (10, 10, 10))
    boxes = Found(("cat",), torch.tensor([[20.0, 30, 60, 70]]), torch.tensor([0]), torch.tensor([0.9]))
    shown = np.asarray(draw(image, boxes))
    assert shown[50, 20].max() > 100
    assert (shown[50, 40] == 10).all()
    assert boxes.as_dict() == {"boxes": [{"box": [20, 30, 60, 70], "class": "cat", "score": pytest.approx(0.9)}]}
    classes = torch.zeros(80, 120, dtype=torch.long)
    classes[:, 60:] = 1
    both = Found(("sky", "sea"), classes=classes)
    shown = np.asarray(draw(image, both))
    assert not (shown[79, 10] == shown[79, 100]).all()
    assert both.as_dict() == {"shares": {"sky": 0.5, "sea": 0.5}}
    nothing = Found(("cat",), torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    assert draw(image, nothing).size == image.size


def test_predict_answers_in_pixels_of_the_file(learned: tuple[str, Path, Path]) -> None:
    task, _, out = learned
    model = attendless.load(out / "last.safetensors")
    image = Image.new("RGB", (75, 51))
    found = predict(model, image, score=0.0)
    if task == "segmentation":
        assert found.classes is not None
        assert found.classes.shape == (51, 75)
    else:
        assert found.boxes is not None
        assert (found.boxes <= torch.tensor([75, 51, 75, 51])).all()


def test_a_picture_that_cannot_be_read_is_skipped_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = TOYS["segmentation"](tmp_path / "data")
    (data / "train" / "images" / "2.png").write_bytes(b"no picture")
    (data / "val" / "images" / "1.png").write_bytes(b"no picture")
    result = learn("segmentation", data, tmp_path / "run", epochs=1)
    assert "skipped, cannot be read: train/images/2.png" in capsys.readouterr().err
    assert (result.metrics["images"], result.metrics["skipped"]) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_two_processes_learn_as_one_does(task: str, tmp_path: Path) -> None:
    data = TOYS[task](tmp_path / "data")
    learn(task, data, tmp_path / "one", epochs=1, clip=0.0)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_dense_training import learn\nfrom pathlib import Path\n"
        "learn(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), epochs=1, clip=0.0)\n"
    )
    file = tmp_path / "run.py"
    file.write_text(script)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        str(file),
        str(Path(__file__).parent),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, task, str(data), str(tmp_path / "two")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(tmp_path / name / "last.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-3, rtol=0.05)


@pytest.mark.slow
def test_rectangles_are_learned(tmp_path: Path) -> None:
    data = toy_masks(tmp_path / "data", train=64, val=8, times=2)
    result = learn("segmentation", data, tmp_path / "run", epochs=12, lr=2e-3, eval_every=12, size=(64,))
    assert result.metrics["miou"] > 80
