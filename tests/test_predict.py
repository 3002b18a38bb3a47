"""Predicting: the answers are those of the model on timm's own preprocessing, in any batch; shards resume; nothing that
cannot be read stops the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import attendless
from attendless.data.names import names_of
from attendless.data.source import load_image
from attendless.export.description import describe
from attendless.export.runner import Runner
from attendless.measure.accuracy import preprocessing
from attendless.predict import Opening, Predictor, find_pictures, predict
from attendless.predict.onray import compute_on_ray
from attendless.predict.shards import Plan, begin, compute_here, unreadable
from attendless.sizes import image_config
from attendless_cli.main import main

MODEL = "columnar_micro_patch4_32"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven pictures of several sizes and kinds, and two files that are none."""
    root = tmp_path_factory.mktemp("pictures")
    draw = torch.Generator().manual_seed(1)
    for number in range(8):
        pixels = torch.randint(256, (40 + 7 * number, 61, 3), dtype=torch.uint8, generator=draw)
        Image.fromarray(pixels.numpy()).save(root / f"{number}.png")
    Image.fromarray(pixels.numpy()).convert("CMYK").save(root / "cmyk.jpg")
    Image.fromarray(pixels.numpy()[:, :, 0]).save(root / "grey.png")
    (root / "deeper").mkdir()
    Image.fromarray(pixels.numpy()).convert("P").save(root / "deeper" / "palette.gif")
    (root / "broken.png").write_bytes(b"no picture")
    (root / "deeper" / "hollow.jpg").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    model = timm.create_model(MODEL, num_classes=6)
    model.pretrained_cfg = {**image_config(model), "label_names": ("a", "b", "c", "d", "n01440764", "f")}
    attendless.save(model, path)
    return path


def expected(model: torch.nn.Module, path: str) -> torch.Tensor:
    """The slow way: one picture, timm's transform, the model."""
    transform = preprocessing(model, (32, 32))
    with torch.no_grad():
        return model(transform(load_image(path))[None])[0].softmax(0)


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_answers_are_the_models_own(pictures: Path, saved: Path, batch: int) -> None:
    model = attendless.load(saved)
    files = find_pictures([pictures])
    found = [answer for part in predict(Opening(str(saved)).open(), files, batch=batch, topk=3) for answer in part]
    assert [answer.image for answer in found] == list(files)
    assert {Path(answer.image).name for answer in found if answer.error} == {"broken.png", "hollow.jpg"}
    for answer in found:
        if answer.error is None:
            probabilities, classes = expected(model, answer.image).topk(3)
            assert list(answer.classes) == classes.tolist()
            assert list(answer.probabilities) == pytest.approx(probabilities.tolist(), abs=1e-5)


def test_bytes_become_what_timm_makes_of_them(pictures: Path, saved: Path) -> None:
    model = attendless.load(saved)
    predictor = Opening(str(saved)).open()
    seen = []
    watched = Runner("eager", predictor.runner.description, lambda images: (seen.append(images) or model(images),))
    pixels = predictor.card.preparation()(load_image(pictures / "3.png"))
    Predictor(watched)(torch.from_numpy(pixels.copy())[None])
    assert torch.equal(seen[-1][0], preprocessing(model, (32, 32))(load_image(pictures / "3.png")))


def test_features_stand_before_the_classifier(pictures: Path, saved: Path) -> None:
    model = attendless.load(saved)
    ((answer,),) = predict(Opening(str(saved), features=True).open(), [str(pictures / "0.png")])
    with torch.no_grad():
        image = preprocessing(model, (32, 32))(load_image(pictures / "0.png"))[None]
        features = model.forward_head(model.forward_features(image), pre_logits=True)[0]
    assert list(answer.features or ()) == pytest.approx(features.tolist(), abs=1e-4)
    assert answer.classes


def test_a_model_without_classifier_gives_features_alone(pictures: Path, tmp_path: Path) -> None:
    attendless.save(timm.create_model(MODEL, num_classes=0), tmp_path / "m.safetensors")
    with pytest.raises(attendless.UserError, match="has no classifier: give --features"):
        Opening(str(tmp_path / "m.safetensors")).open()
    opened = Opening(str(tmp_path / "m.safetensors"), features=True).open()
    ((answer,),) = predict(opened, [str(pictures / "0.png")])
    assert answer.classes == ()
    assert len(answer.features or ()) == opened.card.features > 0


@pytest.mark.parametrize(
    ("batch", "runtime", "met"), [(4, "onnx", {4}), (None, "compile", {1, 2, 4, 8}), (None, "eager", set(range(1, 8)))]
)
def test_numbers_of_images_that_a_runtime_meets(saved: Path, batch: int | None, runtime: str, met: set[int]) -> None:
    """A file of a fixed batch is filled up, a compiled model meets few numbers; the answers are the same."""
    model, seen = attendless.load(saved), set()

    def run(images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.add(len(images))
        with torch.no_grad():
            return (model(images),)

    predictor = Predictor(Runner(runtime, describe(model, batch=batch), run))
    pixels = torch.randint(256, (7, 32, 32, 3), dtype=torch.uint8)
    plain = Opening(str(saved)).open()(pixels)
    for count in range(1, 8):
        torch.testing.assert_close(predictor(pixels[:count]), plain[:count], atol=1e-5, rtol=1e-5)
    assert seen == met


def test_names(saved: Path) -> None:
    assert Opening(str(saved)).open().card.names() == ("a", "b", "c", "d", "tench, Tinca tinca", "f")
    assert names_of((), 1000)[207] == "golden retriever"
    assert names_of((), 7)[6] == "class 6"


def test_random_weights_are_the_same_in_every_process() -> None:
    pixels = torch.randint(256, (1, 32, 32, 3), dtype=torch.uint8)
    one, other = (Opening(MODEL).open() for _ in range(2))
    assert one.card.random
    assert torch.equal(one(pixels), other(pixels))


def test_nan_is_no_answer(pictures: Path, saved: Path) -> None:
    description = describe(attendless.load(saved))
    nothing = Predictor(Runner("eager", description, lambda images: (torch.full((len(images), 6), float("nan")),)))
    with pytest.raises(attendless.UserError, match=r"NaN or infinity for image '.*0.png'"):
        list(predict(nothing, [str(pictures / "0.png")]))


# Exported files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "batch"), [("m.onnx", 4), ("m.onnx", None), ("m.xml", None), ("m.pt2", 1)])
@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_an_exported_file_answers_as_the_model_does(
    pictures: Path, saved: Path, tmp_path: Path, name: str, batch: int | None
) -> None:
    for package in {"m.onnx": ("onnx", "onnxruntime"), "m.xml": ("openvino",)}.get(name, ()):
        pytest.importorskip(package)
    attendless.export(str(saved), tmp_path / name, batch=batch, measure=False)
    files = find_pictures([pictures])
    found = [answer for part in predict(Opening(str(tmp_path / name)).open(), files, batch=5) for answer in part]
    plain = [answer for part in predict(Opening(str(saved)).open(), files) for answer in part]
    assert [(one.image, one.classes, one.names) for one in found] == [(o.image, o.classes, o.names) for o in plain]
    for one, other in zip(found, plain, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
    with pytest.raises(attendless.UserError, match="without features"):
        Opening(str(tmp_path / name), features=True).open()


@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_exported_features_are_averaged(pictures: Path, saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    attendless.export(str(saved), tmp_path / "maps.onnx", features=True, measure=False)
    ((answer,),) = predict(Opening(str(tmp_path / "maps.onnx")).open(), [str(pictures / "0.png")])
    model = attendless.load(saved)
    image = preprocessing(model, (32, 32))(load_image(pictures / "0.png"))[None]
    with torch.no_grad():
        maps = model.forward_intermediates(image, indices=[-1], norm=True, intermediates_only=True)[-1]
    assert answer.classes == ()
    assert list(answer.features or ()) == pytest.approx(maps.mean((-2, -1))[0].tolist(), abs=1e-3)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_verb(pictures: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answers.json"
    code = main(["predict", str(saved), str(pictures), "--topk", "2", "--json", str(out), "--batch", "5"])
    printed = capsys.readouterr()
    assert code == 1
    assert "2 of 13 images could not be read" in printed.err
    assert "broken.png" in printed.err
    assert str(pictures / "0.png") in printed.out
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 13
    (first,) = [row for row in rows if row["image"].endswith("0.png")]
    assert [set(answer) for answer in first["answers"]] == [{"class", "name", "probability"}] * 2
    assert sum("error" in row for row in rows) == 2


def test_random_weights_are_said(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", MODEL, str(pictures / "0.png"), "--attention", "foveal:keep=0.5"]) == 0
    assert "random weights: these predictions mean nothing" in capsys.readouterr().err


# Shards --------------------------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict]:
    parquet = pytest.importorskip("pyarrow.parquet")
    return parquet.read_table(folder).to_pylist()


def test_shards_resume(pictures: Path, saved: Path, tmp_path: Path) -> None:
    files = find_pictures([pictures])
    plan = Plan(Opening(str(saved), features=True), files, topk=2, batch=2, shard=4)
    predictor = plan.opening.open()
    assert sum(compute_here(predictor, plan, begin(plan, tmp_path / "whole"))) == 13
    first = begin(plan, tmp_path / "parts")
    assert [Path(shard.path).name for shard in first] == [f"part-0000{n}-of-00004.parquet" for n in range(4)]
    list(compute_here(predictor, plan, first[1:2]))
    before = os.stat(first[1].path).st_mtime_ns
    missing = begin(plan, tmp_path / "parts")
    assert [shard.path for shard in missing] == [first[0].path, first[2].path, first[3].path]
    list(compute_here(predictor, plan, missing))
    assert os.stat(first[1].path).st_mtime_ns == before, "what is complete is not computed again"
    assert begin(plan, tmp_path / "parts") == []
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    rows = rows_of(tmp_path / "whole")
    assert [row["image"] for row in rows] == list(files)
    assert len(rows[1]["features"]) == predictor.card.features
    assert len(unreadable(first)) == sum(row["error"] is not None for row in rows) == 2


def test_another_commands_folder_is_refused(pictures: Path, saved: Path, tmp_path: Path) -> None:
    files = find_pictures([pictures])
    begin(Plan(Opening(str(saved)), files), tmp_path / "out")
    for other in (Plan(Opening(str(saved)), files[1:]), Plan(Opening(str(saved), attention="foveal"), files)):
        with pytest.raises(attendless.UserError, match="contains the results of a command with another"):
            begin(other, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(attendless.UserError, match="`predict` did not write"):
        begin(Plan(Opening(str(saved)), files), tmp_path / "mine")


def test_a_name_that_is_no_text(pictures: Path, saved: Path, tmp_path: Path) -> None:
    strange = tmp_path / os.fsdecode(b"caf\xe9.png")
    strange.write_bytes((pictures / "0.png").read_bytes())
    plan = Plan(Opening(str(saved)), find_pictures([tmp_path]))
    list(compute_here(plan.opening.open(), plan, begin(plan, tmp_path / "out")))
    assert [Path(row["image"]).name for row in rows_of(tmp_path / "out")] == ["caf\\xe9.png"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_ray_cluster_whose_worker_is_killed_loses_nothing(pictures: Path, saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="Ray is not installed: pip install 'attendless[cluster]'")
    many = tmp_path / "many"
    many.mkdir()
    for number in range(600):
        os.link(pictures / f"{number % 8}.png", many / f"{number:04d}.png")
    (many / "bad.png").write_bytes(b"no picture")
    words = ["predict", str(saved), str(many), "--shard", "5", "--batch", "1", "--threads", "1"]
    assert main([*words, "--out", str(tmp_path / "here")]) == 1
    command = [sys.executable, "-m", "attendless", *words, "--out", str(tmp_path / "ray"), "--ray", "local"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        killed = kill_a_worker(running, tmp_path / "ray")
        said = running.communicate(timeout=300)
    finally:
        running.kill()
    assert killed
    assert running.returncode == 1, said
    assert "1 of 601 images could not be read" in said[1]
    assert rows_of(tmp_path / "ray") == rows_of(tmp_path / "here")


def kill_a_worker(running: subprocess.Popen, folder: Path) -> bool:
    """Kill one of the two processes with the model, of the cluster that `running` started, once it has begun."""
    psutil = pytest.importorskip("psutil")
    while running.poll() is None:
        done = len(list(folder.glob("part-*"))) if folder.is_dir() else 0
        if 3 <= done < 100:
            ours = [
                p for p in psutil.Process(running.pid).children(recursive=True) if "MapWorker" in "".join(p.cmdline())
            ]
            if len(ours) == 2:
                ours[0].send_signal(signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def test_ray_without_work_starts_nothing(saved: Path) -> None:
    assert list(compute_on_ray("nowhere", Plan(Opening(str(saved)), ()), [])) == []
