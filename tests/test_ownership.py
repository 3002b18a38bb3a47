"""Files that attendless did not write survive every command without `--force`; its own are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from attendless.ownership import is_ours, picture_mark
from attendless.show.figures import new_figure, save_figure
from attendless_cli.main import main
from attendless_cli.targets import FOLDERS

MODEL = "columnar_micro_patch4_32"
SOMEBODYS = b"notes of somebody who has heard of attendless\n"


def run(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ["model", "json", "page", ".png", ".svg", ".pdf", ".onnx", ".xml", ".pt2", ".so"])
def test_the_word_alone_is_no_mark(kind: str) -> None:
    Path("file").write_bytes(SOMEBODYS)
    assert not is_ours("file", kind)
    Path("file").write_bytes(b"")
    assert is_ours("file", kind)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_figures_of_others_are_not_ours(suffix: str) -> None:
    figure = new_figure()
    figure.suptitle("attendless")
    figure.savefig(f"theirs{suffix}")
    save_figure(figure, f"ours{suffix}")
    assert not is_ours(f"theirs{suffix}", suffix)
    assert is_ours(f"ours{suffix}", suffix)


def test_pages_of_others_are_not_ours() -> None:
    Path("theirs.html").write_text("<!doctype html><html><title>attendless, a review</title></html>")
    assert not is_ours("theirs.html", "page")


def export(*words: str) -> int:
    return run("export", MODEL, "--attention", "foveal:keep=0.5", "--below-breakeven", "keep", "--quick", *words)


@pytest.mark.parametrize(
    ("words", "foreign"),
    [
        (("--out", "ex.xml"), "ex.bin"),
        (("--out", "ex.xml"), "libattendless_openvino.so"),
        (("--out", "ex.onnx", "--kernels"), "libattendless_onnxruntime.so"),
        (("--out", "ex.onnx"), "ex.onnx"),
        (("--out", "ex.pt2"), "ex.pt2"),
        (("--out", "ex.xml"), "ex.xml"),
    ],
)
def test_export_keeps_what_is_not_ours(
    words: tuple[str, ...], foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(foreign).write_bytes(SOMEBODYS)
    assert export(*words) == 2
    assert f"{foreign}" in (told := capsys.readouterr().err)
    assert "--force" in told
    assert Path(foreign).read_bytes() == SOMEBODYS
    assert [path.name for path in Path().iterdir()] == [foreign]


@pytest.mark.parametrize("name", ["ex.onnx", "ex.xml", "ex.pt2"])
def test_export_replaces_its_own(name: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    assert export("--out", name) == 0
    assert is_ours(name, Path(name).suffix)
    assert export("--out", name) == 0


@pytest.mark.parametrize("name", FOLDERS["run"][1])
def test_train_keeps_what_is_not_ours(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out", name).write_bytes(SOMEBODYS)
    assert run("train", MODEL, "--data", "scenes", "--out", "out") == 2
    assert f"holds '{name}', a file that attendless did not write; --force" in capsys.readouterr().err
    assert [(path.name, path.read_bytes()) for path in Path("out").iterdir()] == [(name, SOMEBODYS)]


@pytest.mark.parametrize("command", ["compare", "demo"])
@pytest.mark.parametrize("name", ["report.html", "results.json"])
def test_compare_keeps_what_is_not_ours(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out", name).write_bytes(SOMEBODYS)
    assert run(command, "--out", "out") == 2
    assert f"holds '{name}', a file that attendless did not write; --force" in capsys.readouterr().err
    assert [(path.name, path.read_bytes()) for path in Path("out").iterdir()] == [(name, SOMEBODYS)]


def test_a_run_writes_only_files_that_are_checked() -> None:
    Path("out").mkdir()
    Path("out", "metrics.jsonl").write_bytes(SOMEBODYS)
    words = ("train", MODEL, "--data", "scenes:train=64,val=32", "--out", "out", "--epochs", "1", "--workers", "0")
    assert run(*words, "--force") == 0
    assert SOMEBODYS not in Path("out", "metrics.jsonl").read_bytes()
    description, files = FOLDERS["run"]
    assert {path.name for path in Path("out").iterdir()} <= {description, *files, ".lock"}
    assert run(*words) == 0  # the folder is ours now


def test_drawings_keep_images_of_the_same_name(capsys: pytest.CaptureFixture[str]) -> None:
    from attendless_cli.tasks import _drawings

    Image.new("RGB", (8, 8)).save("dog.png")
    with pytest.raises(ValueError, match=r"holds 'dog.png', a file that attendless did not write; --force"):
        _drawings(["photos/dog.jpg"], ".", force=False)
    assert _drawings(["photos/dog.jpg"], ".", force=True) == {"photos/dog.jpg": Path("dog.png")}
    assert _drawings(["photos/cat.jpg"], ".", force=False) == {"photos/cat.jpg": Path("cat.png")}
    assert picture_mark(".PNG") == {"Software": "attendless"}


def test_saved_models_are_told_from_weights() -> None:
    from safetensors.torch import save_file

    save_file({"attendless": torch.zeros(1)}, "w.safetensors", metadata={"title": "attendless"})
    assert not is_ours("w.safetensors", "model")
