"""A run that was interrupted ends in the same bits as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attendless.train import Run, distill, distill_losses, train
from attendless.train.checkpoint import Store
from train_toys import FIELDS, RUN, counting_vit, rows_of, same_bits, tensors_of, toy_folder, toy_vit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("plain")
    train(toy_vit(), folder, out=out, run=RUN, **FIELDS)
    return out


@pytest.mark.parametrize("dies", [1, 2, 5, 7])
def test_dying_anywhere_changes_no_bit(folder: Path, plain: Path, tmp_path: Path, monkeypatch, dies: int) -> None:
    """The model dies at its `dies`-th step, again and again; each attempt gets further than the one before."""
    counter = tmp_path / "steps"
    counter.touch()
    monkeypatch.setenv("COUNT_STEPS", str(counter))
    attempts = 0
    while attempts < 20:
        monkeypatch.setenv("FAIL_AT", str(counter.stat().st_size + 1 + dies))
        attempts += 1
        try:
            train(counting_vit(), folder, out=tmp_path / "run", run=RUN, **FIELDS)
            break
        except SystemExit:
            pass
    assert attempts == -(-9 // dies)
    assert same_bits(tensors_of(tmp_path / "run"), tensors_of(plain))
    assert rows_of(tmp_path / "run") == rows_of(plain)


def test_a_stop_is_a_pause(folder: Path, plain: Path, tmp_path: Path, monkeypatch) -> None:
    counter = tmp_path / "steps"
    monkeypatch.setenv("COUNT_STEPS", str(counter))
    model = counting_vit()
    forward = type(model).forward_features

    def interrupt(self, x, **more):
        if self.training and counter.exists() and counter.stat().st_size == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, x, **more)

    monkeypatch.setattr(type(model), "forward_features", interrupt)
    stopped = train(model, folder, out=tmp_path / "run", run=RUN, **FIELDS)
    assert not stopped.finished
    assert stopped.steps == 5
    assert train(counting_vit(), folder, out=tmp_path / "run", run=RUN, **FIELDS).finished
    assert same_bits(tensors_of(tmp_path / "run"), tensors_of(plain))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_matter(folder: Path, plain: Path, tmp_path: Path, workers: int) -> None:
    train(toy_vit(), folder, out=tmp_path, run=Run(workers=workers), **FIELDS)
    assert same_bits(tensors_of(tmp_path), tensors_of(plain))


def test_a_finished_run_stays_as_it_is(folder: Path, plain: Path) -> None:
    before, rows = tensors_of(plain), rows_of(plain)
    again = train(toy_vit(seed=5), folder, out=plain, run=RUN, **FIELDS)
    assert again.finished
    assert again.steps == 9
    assert same_bits(tensors_of(plain), before)
    assert rows_of(plain) == rows


def test_a_damaged_checkpoint_falls_back_to_the_one_before(folder: Path, plain: Path, tmp_path: Path, capfd) -> None:
    train(toy_vit(), folder, out=tmp_path, run=RUN, **FIELDS)
    store = Store(tmp_path / "checkpoints")
    newest = store.path(store.steps()[-1])
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    train(toy_vit(), folder, out=tmp_path, run=RUN, **FIELDS)
    said = capfd.readouterr().err.replace("\n", " ")
    assert f"{newest.name}' is damaged" in said
    assert "resuming after step 8" in said
    assert same_bits(tensors_of(tmp_path), tensors_of(plain))


@pytest.mark.parametrize("fields", [{"schedule": "plateau", "optimizer": "adam", "patience": 0}, {"accumulate": 2}])
def test_other_schedules_resume_exactly(folder: Path, tmp_path: Path, monkeypatch, fields: dict) -> None:
    fields = {**FIELDS, **fields}
    train(toy_vit(), folder, out=tmp_path / "plain", run=RUN, **fields)
    monkeypatch.setenv("COUNT_STEPS", str(tmp_path / "steps"))
    monkeypatch.setenv("FAIL_AT", "8")
    with pytest.raises(SystemExit):
        train(counting_vit(), folder, out=tmp_path / "run", run=RUN, **fields)
    monkeypatch.delenv("FAIL_AT")
    train(counting_vit(), folder, out=tmp_path / "run", run=RUN, **fields)
    assert same_bits(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "plain"))


def test_distillation_resumes_in_its_phase(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Stopped in the second phase, with another optimiser and other trained parameters than the first."""
    fields = {"batch": 16, "change": {"new": "epochs=1", "all": "epochs=2"}}
    teacher = toy_vit()
    distill(teacher, folder, attention="linformer", out=tmp_path / "plain", run=RUN, **fields)

    compute, calls = distill_losses.Distillation.forward, []

    def die(self, *args):
        calls.append(0)
        if len(calls) == 6:
            raise SystemExit
        return compute(self, *args)

    monkeypatch.setattr(distill_losses.Distillation, "forward", die)
    with pytest.raises(SystemExit):
        distill(teacher, folder, attention="linformer", out=tmp_path / "run", run=RUN, **fields)
    again = distill(teacher, folder, attention="linformer", out=tmp_path / "run", run=RUN, **fields)
    assert again.finished
    assert len(calls) == 10
    assert same_bits(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "plain"))


SCRIPT = """
import sys
from train_toys import FIELDS, RUN, rows_of, counting_vit
from attendless.train import Run, train
fields = FIELDS | {"epochs": 100}
train(counting_vit(), sys.argv[1], out=sys.argv[2], run=Run(workers=1, checkpoint_minutes=float(sys.argv[3])), **fields)
"""


@pytest.mark.slow
def test_twenty_kills(folder: Path, tmp_path: Path) -> None:
    """kill -9 at 20 random moments: the same bits, never from the start again, less than half of the work repeated."""
    draw = random.Random(int.from_bytes(os.urandom(4), "little"))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def start(name: str) -> subprocess.Popen:
        words = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / name), "0.01"]
        counter = {"COUNT_STEPS": str(tmp_path / f"{name}.steps")}
        return subprocess.Popen(words, env=environment | counter, stderr=subprocess.PIPE, text=True)

    plain = start("plain")
    said = plain.communicate()[1]
    assert plain.returncode == 0, said
    total = (tmp_path / "plain.steps").stat().st_size
    counter, kills, resumed = tmp_path / "run.steps", 0, []
    counter.touch()
    while kills < 20:
        process, before = start("run"), counter.stat().st_size
        # One in four while starting up, the others within the work: in a step, an evaluation or a checkpoint.
        early = time.monotonic() + (draw.uniform(0, 15) if draw.random() < 0.25 else 3600)
        wanted = draw.randint(1, total // 12)
        while process.poll() is None and counter.stat().st_size - before < wanted and time.monotonic() < early:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1]
        kills += 1
        if "resuming after step" in said:
            resumed.append(int(said.split("resuming after step ")[1].split()[0]))
        elif counter.stat().st_size > before:
            assert not resumed, "a run that had a checkpoint started from nothing"
    last = start("run")
    said = last.communicate()[1]
    assert last.returncode == 0, said
    assert resumed == sorted(resumed)
    assert same_bits(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "plain"))
    computed = counter.stat().st_size
    report = {"kills": kills, "resumed after": resumed, "steps": total, "computed": computed}
    print(json.dumps(report))
    assert computed < 1.5 * total
