"""Two processes are one: the same losses, the same weights, every picture counted once (gloo, on CPU)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attendless.train import Run, distill, train
from attendless.train.log import read_rows
from train_toys import toy_folder, toy_vit

FIELDS = {"epochs": 2, "batch": 16, "size": (16,), "mixup": 0.8, "cutmix": 1.0, "augment": "rand-m9-inc1", "clip": 1.0}
PHASES = {"change": {"new": "epochs=1", "all": "epochs=1"}, "batch": 16}
SCRIPT = """
import sys
from test_train_processes import FIELDS, PHASES, RUN
from train_toys import toy_vit
from attendless.train import distill, train
from attendless.train.process import accelerator
assert accelerator().num_processes == 2
train(toy_vit(), sys.argv[1], out=sys.argv[2] + "/train", run=RUN, **FIELDS)
distill(toy_vit(), sys.argv[1], attention="linformer", out=sys.argv[2] + "/distill", run=RUN, **PHASES)
"""
RUN = Run(workers=0, log_every=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = toy_folder(tmp_path_factory.mktemp("toy"))
    for place in ("val/class1/3.png", "train/class0/1.png", "train/class2/7.png"):
        (root / place).write_bytes(b"")
    return root


def torchrun(*words: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run([*start, *words], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    script = out / "script.py"
    script.write_text(SCRIPT)
    done = torchrun(str(script), str(folder), str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("command", ["train", "distill"])
def test_two_processes_are_one(folder: Path, two: Path, tmp_path: Path, command: str) -> None:
    if command == "train":
        train(toy_vit(), folder, out=tmp_path, run=RUN, **FIELDS)
    else:  # the first phase trains few parameters: the others get no gradient, and nothing waits for them
        distill(toy_vit(), folder, attention="linformer", out=tmp_path, run=RUN, **PHASES)
    one, both = read_rows(tmp_path / "metrics.jsonl"), read_rows(two / command / "metrics.jsonl")
    assert [row["step"] for row in one] == [row["step"] for row in both]
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in both], abs=1e-4)
    for a, b in zip(one, both, strict=True):
        if a["event"] == "epoch":
            assert (a["images"], a["skipped"]) == (b["images"], b["skipped"]) == (20, 1)
            assert a["top1"] == pytest.approx(b["top1"])
            assert a["skipped_training_images"] == b["skipped_training_images"]
    mine, theirs = (load_file(place / "last.safetensors") for place in (tmp_path, two / command))
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_said_by_every_process(folder: Path, tmp_path: Path) -> None:
    words = ["-m", "attendless", "train", "test_vit", "--data", str(folder), "--batch", "17"]
    done = torchrun(*words, "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "does not divide into 2" in done.stderr
    assert not (tmp_path / "run").exists()
