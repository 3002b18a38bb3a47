"""`attendless train` and `attendless distill` as they are typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from attendless.convert import load
from attendless.convert.files import read_header
from attendless.train.recipe import recipe
from attendless_cli.main import main
from train_toys import toy_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


def test_train_then_distill(folder: Path, tmp_path: Path, capsys) -> None:
    words = ["--data", str(folder), "--batch", "20", "--workers", "0", "--json", str(tmp_path / "j")]
    fields = ["--recipe", "quick:epochs=7", "--epochs", "1", "--size", "32"]
    fields += ["--set", "weight_decay=0.1", "drop_path=0.1", "--set", "log_every=1"]
    assert main(["train", "test_vit", "--out", str(tmp_path / "a"), *words, *fields]) == 0
    row = json.loads((tmp_path / "j").read_text())["rows"][0]
    assert (row["model"], row["steps"], row["finished"], row["images"]) == ("test_vit", 3, True, 21)
    recipe = json.loads((tmp_path / "a" / "recipe.json").read_text())["what"]["phases"][0]["recipe"]
    assert (recipe["epochs"], recipe["size"], recipe["weight_decay"], recipe["drop_path"]) == (1, [32, 32], 0.1, 0.1)
    trained = str(tmp_path / "a" / "best.safetensors")
    phases = ["--phase", "new:epochs=1", "--phase", "all:epochs=1,loss.tokens=2"]
    assert main(["distill", trained, "--attention", "linformer", "--out", str(tmp_path / "b"), *words, *phases]) == 0
    assert load(tmp_path / "b" / "last.safetensors").attention.startswith("linformer")
    printed = capsys.readouterr().out
    for name in ("a", "b"):
        file = tmp_path / name / "best.safetensors"
        assert f"next: attendless eval {file} --data {folder}\nnext: attendless bench {file}\n" in printed


def test_a_file_knows_its_classes_and_how_it_was_judged(folder: Path, tmp_path: Path, capsys) -> None:
    """What `train` says of its best model, `eval` says too, from the file alone."""
    words = ["--data", str(folder), "--batch", "20", "--workers", "0", "--json", str(tmp_path / "j")]
    fields = ["--epochs", "2", "--size", "32", "--seed", "3", "--set", "crop_pct=0.5", "interpolation=bilinear"]
    model = "test_vit"  # timm says: 1000 classes, 160 pixels, crop 0.95
    assert main(["train", model, "--out", str(tmp_path / "a"), *words, *fields]) == 0
    best = tmp_path / "a" / "best.safetensors"
    said = read_header(best)["preparation"]
    assert said["label_names"] == ["class0", "class1", "class2"]
    assert (said["num_classes"], said["crop_pct"], said["input_size"]) == (3, 0.5, [3, 32, 32])
    assert (said["interpolation"], said["crop_mode"]) == ("bilinear", "center")
    expected = json.loads((tmp_path / "j").read_text())["rows"][0]["best"]
    evaluate = ["eval", str(best), "--workers", "0", "--json", str(tmp_path / "j")]
    assert main([*evaluate, "--data", str(folder)]) == 0
    row = json.loads((tmp_path / "j").read_text())["rows"][0]
    assert (row["top1"], row["labels"]) == (pytest.approx(expected), "by name")
    # A student keeps its teacher's names, also where the pictures' labels are others.
    others = tmp_path / "others"
    for split in ("train", "val"):
        for i in range(3):
            shutil.copytree(folder / split / f"class{i}", others / split / f"kind{i}")
    words[1] = str(others)
    capsys.readouterr()
    out = str(tmp_path / "b")
    assert main(["distill", str(best), "--attention", "full", "--out", out, *words, "--phase", "all:epochs=1"]) == 0
    captured = capsys.readouterr()
    assert "the labels are not the teacher's classes: training ignores them" in captured.err
    assert f"--data {others} --no-labels\n" in captured.out
    row = json.loads((tmp_path / "j").read_text())["rows"][0]
    assert "top1" not in row
    assert "agreement" in row
    assert read_header(tmp_path / "b" / "best.safetensors")["preparation"]["label_names"] == said["label_names"]


def test_what_comes_with_weights_is_fine_tuned(folder: Path, tmp_path: Path, capsys) -> None:
    words = ["--data", str(folder), "--batch", "20", "--epochs", "1", "--workers", "0"]
    assert main(["train", "columnar_micro_patch4_32", "--out", str(tmp_path / "a"), *words]) == 0
    assert "recipe quick, to start from scratch: 1 epochs, lr 0.001" in capsys.readouterr().err
    saved = str(tmp_path / "a" / "last.safetensors")
    assert main(["train", saved, "--out", str(tmp_path / "b"), *words]) == 0
    assert "recipe finetune, the model comes with weights" in capsys.readouterr().err
    chosen = json.loads((tmp_path / "b" / "recipe.json").read_text())["what"]["phases"][0]["recipe"]
    made = recipe("finetune")
    assert (chosen["lr"], chosen["layer_decay"]) == (made.lr, made.layer_decay)
    weights = tmp_path / "w.safetensors"
    save_file(load(saved).state_dict(), weights)
    model = ["train", "columnar_micro_patch4_32", "--weights", str(weights)]
    assert main([*model, "--recipe", "quick", "--out", str(tmp_path / "c"), *words]) == 0
    assert "recipe" not in capsys.readouterr().err
    chosen = json.loads((tmp_path / "c" / "recipe.json").read_text())["what"]["phases"][0]["recipe"]
    assert chosen["lr"] == 1e-3


def test_what_will_be_slower_is_said_at_the_start(folder: Path, tmp_path: Path, capsys) -> None:
    words = ["train", "columnar_micro_patch4_32", "--data", str(folder), "--batch", "20", "--epochs", "1"]
    words += ["--workers", "0"]
    assert main([*words, "--attention", "full", "--out", str(tmp_path / "a")]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*words, "--attention", "full/foveal:keep=1/linformer:keys=2", "--out", str(tmp_path / "b")]) == 0
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "at 32 px 1 of the 2 layers with efficient attention are not faster than full attention" in said
    assert said.index("warning") < said.index("train epoch 1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipe", "quik"], "Did you mean 'quick'"),
        (["--set", "lr=much"], "expected a number"),
        (["--epochs", "-1"], "expected a whole number"),
        (["--size", "32x"], "expected S or HxW"),
        (["--attention", "linfomer"], "Did you mean 'linformer'"),
        (["--set", "schedule=cosin"], "cosine or plateau or constant"),
        (["--set", "epochs=-1"], "out of range"),
        (["--set", "weight_decy=1"], "Did you mean 'weight_decay'? There are: accumulate, "),
        (["--set", "lr"], "expected KEY=VALUE"),
        (["--set", "lr=1", "lr=2"], "given twice"),
        (["--epochs", "1", "--set", "epochs=2"], "given twice"),
        (["--set", "size=32/48"], "expected S or HxW"),
        (["--set", "scales=320"], "unknown field of a classification recipe 'scales'"),
        (["--lr", "1"], "give --set lr=VALUE"),
    ],
)
def test_mistakes_are_answered_in_one_line(folder: Path, tmp_path: Path, capsys, words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "test_vit", "--data", str(folder), "--out", str(tmp_path / "run"), "--workers", "0", *words])
    assert left.value.code == 2
    said = capsys.readouterr().err.strip()
    assert says in said
    assert said.count("\n") == 0
    assert not (tmp_path / "run").exists()
