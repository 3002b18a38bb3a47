"""A run on a disk that fills up: one line, nothing lost, and the same bits once there is room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from timm.models.vision_transformer import VisionTransformer

from attendless import UserError
from attendless.train import train
from attendless.train.log import Log
from attendless_cli.main import main
from train_toys import FIELDS, RUN, full_disk, rows_of, same_bits, tensors_of, toy_folder, toy_vit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with room enough."""
    out = tmp_path_factory.mktemp("plain")
    train(toy_vit(), folder, out=out, run=RUN, **FIELDS)
    return out


@pytest.mark.parametrize(
    ("most", "step"),
    [
        (100, 0),  # the recipe does not fit
        (1000, 4),  # nor the next row of the metrics, in the middle of it
        (50_000, 4),  # nor the model
        (250_000, 4),  # nor the checkpoint, which is larger
        (50_000, 6),  # nor the best model so far, at the end of an epoch
    ],
)
def test_a_full_disk_changes_no_bit(
    folder: Path, plain: Path, tmp_path: Path, monkeypatch, most: int, step: int
) -> None:
    forward, steps = VisionTransformer.forward_features, []

    def fills_up(self, x, **more):
        steps.extend([0] * self.training)
        if self.training and len(steps) == step:
            disk.__enter__()
        return forward(self, x, **more)

    with monkeypatch.context() as patch:
        patch.setattr(VisionTransformer, "forward_features", fills_up)
        disk = full_disk(most)
        if not step:
            disk.__enter__()
        try:
            with pytest.raises(UserError, match=r"cannot write .*: File too large.* the same command resumes"):
                train(toy_vit(), folder, out=tmp_path, run=RUN, **FIELDS)
        finally:
            disk.__exit__(None, None, None)
    assert not list(tmp_path.rglob("*.tmp"))
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if step else ():
        json.loads(line)
    assert train(toy_vit(), folder, out=tmp_path, run=RUN, **FIELDS).finished
    assert same_bits(tensors_of(tmp_path), tensors_of(plain))
    assert rows_of(tmp_path) == rows_of(plain)


def test_no_half_of_a_row_stays_behind(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.row({"event": "step", "step": 1})
    before = log.path.read_bytes()
    with full_disk(len(before) + 10), pytest.raises(OSError, match="File too large") as error:
        log.row({"event": "step", "step": 2})
    assert error.value.filename == str(log.path)
    assert log.path.read_bytes() == before


def test_as_it_is_typed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "columnar_micro_patch4_32", "--data", str(folder), "--out", str(tmp_path / "run")]
    words += ["--epochs", "1", "--batch", "20", "--workers", "0", "--set", f"cache={tmp_path / 'cache'}"]
    with full_disk(50_000), pytest.raises(SystemExit) as left:  # the pictures of the cache
        main(words)
    assert left.value.code == 2
    with full_disk(200_000), pytest.raises(SystemExit) as left:  # the model
        main(words)
    assert left.value.code == 2
    errors = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("attendless: error: cannot write")
    ]
    assert len(errors) == 2
    assert main(words) == 0
