"""`attendless train` and `attendless distill` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attendless.convert import load
from attendless_cli.main import main
from train_toys import toy_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


def test_train_then_distill(folder: Path, tmp_path: Path, capsys) -> None:
    words = ["--data", str(folder), "--batch", "20", "--workers", "0", "--json", str(tmp_path / "j")]
    fields = [
        "--recipe",
        "quick:epochs=7",
        "--epochs",
        "1",
        "--size",
        "32",
        "--weight-decay",
        "0.1",
        "--drop_path",
        "0.1",
    ]
    assert main(["train", "test_vit", "--out", str(tmp_path / "a"), *words, *fields]) == 0
    row = json.loads((tmp_path / "j").read_text())["rows"][0]
    assert (row["model"], row["steps"], row["finished"], row["images"]) == ("test_vit", 3, True, 21)
    recipe = json.loads((tmp_path / "a" / "recipe.json").read_text())["what"]["phases"][0]["recipe"]
    assert (recipe["epochs"], recipe["size"], recipe["weight_decay"], recipe["drop_path"]) == (1, [32, 32], 0.1, 0.1)
    trained = str(tmp_path / "a" / "best.safetensors")
    phases = ["--phase", "new:epochs=1", "--phase", "all:epochs=1,tokens=2"]
    assert main(["distill", trained, "--attention", "linformer", "--out", str(tmp_path / "b"), *words, *phases]) == 0
    assert load(tmp_path / "b" / "last.safetensors").attention.startswith("linformer")
    assert "best.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipe", "quik"], "Did you mean 'quick'"),
        (["--lr", "much"], "expected a number"),
        (["--epochs", "-1"], "out of range"),
        (["--size", "32x"], "expected S or HxW"),
        (["--attention", "linfomer"], "Did you mean 'linformer'"),
        (["--schedule", "cosin"], "cosine or plateau or constant"),
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
