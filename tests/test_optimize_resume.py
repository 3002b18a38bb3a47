"""`optimize` after a kill: it resumes, chooses the same variant, and no partial folder is ever visible."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import attendless
import steady_clock
from attendless.export.folder import deployed, manifest
from attendless.optimize import session
from attendless.optimize.optimize import optimize

NAME = "columnar_micro_patch4_32"


def micro() -> nn.Module:
    torch.manual_seed(0)
    model = attendless.open_model(NAME, num_classes=3)
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("optimize")
    draws = np.random.default_rng(0)
    for i in range(18):
        path = place / "photos" / str(i % 3) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    attendless.save(micro(), place / "model.safetensors")
    return place


def start(photos: Path, out: Path) -> subprocess.Popen[bytes]:
    words = ["optimize", str(photos / "model.safetensors"), "--data", str(photos / "photos"), "--out", str(out)]
    # A budget that never ends the search early: how much fits into a shorter one depends on the load of the machine.
    words += ["--max-drop", "100", "--budget", "1h", "--runtime", "eager", "--attention", "none", "--threads", "1"]
    words += ["--cache", f"{out}.cache"]
    text = f"import steady_clock; steady_clock.install(setattr); from attendless_cli.main import run; run({words!r})"
    return subprocess.Popen(
        [sys.executable, "-c", text],
        cwd=Path(__file__).parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait(process: subprocess.Popen[bytes], out: Path, until: Callable[[], bool] = lambda: False) -> bool:
    """Wait until the process ends or `until` is true; meanwhile, a folder that is visible is whole."""
    limit = time.monotonic() + 300
    while process.poll() is None and not until():
        assert time.monotonic() < limit
        if out.exists():
            assert deployed(out) is not None
            assert (out / "report.html").is_file()
        time.sleep(0.02)
    return process.poll() is not None


def measured(out: Path) -> int:
    """The number of values in the log of a search."""
    return sum(file.read_text().count('{"name"') for file in Path(f"{out}.cache").glob("*.jsonl"))


def chosen(out: Path) -> dict[str, object]:
    found = manifest(out)["chosen"]
    return {key: found[key] for key in ("runtime", "precision", "attention", "tokens_spec", "layers", "readout")}


def killed_many_times(photos: Path, place: Path, kills: int) -> None:
    """Kill a search at random moments while it measures; at last it ends as one that was never killed."""
    whole, out, draw = place / "whole", place / "fast", random.Random(0)
    assert wait(start(photos, whole), whole)
    moments = sorted(draw.randrange(measured(whole) * 8 // 10) for _ in range(kills))
    for moment in moments:
        process = start(photos, out)
        assert not wait(process, out, lambda moment=moment: measured(out) >= moment)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.1))
        assert process.poll() is None, "the search ended before it was killed"
        process.kill()
        process.wait()
        assert not out.exists()
    assert wait(start(photos, out), out)
    assert chosen(out) == chosen(whole)
    assert not Path(f"{out}.work").exists()
    assert not [file for file in place.iterdir() if file.name.startswith(".fast.")]


@pytest.mark.slow
def test_a_killed_search_resumes_to_the_same_choice(photos: Path, tmp_path: Path) -> None:
    killed_many_times(photos, tmp_path, 2)


@pytest.mark.slow
def test_ten_kills_change_nothing(photos: Path, tmp_path: Path) -> None:
    killed_many_times(photos, tmp_path, 10)


def test_another_goal_measures_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady_clock.install(monkeypatch.setattr)
    read = list[str]()
    reading = session.read_one

    def counted(model: object, images: object, belief: object, name: str, *given: object) -> object:
        read.append(name)
        return reading(model, images, belief, name, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "read_one", counted)
    images = torch.randn(18, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    asked = {"runtimes": ["eager"], "attention": "none", "threads": 1, "budget": "60s", "cache": tmp_path / "cache"}
    first = optimize(micro(), images, max_drop=50.0, resume=tmp_path / "one", **asked)  # type: ignore[arg-type]
    before, timed = len(read), len(steady_clock.TIMED)
    assert before > 3
    again = optimize(micro(), images, max_drop=50.0, resume=tmp_path / "two", **asked)  # type: ignore[arg-type]
    assert (len(read), len(steady_clock.TIMED)) == (before, timed), "nothing is measured twice"
    assert again.chosen.variant == first.chosen.variant
    optimize(micro(), images, max_drop=40.0, resume=tmp_path / "three", **asked)  # type: ignore[arg-type]
    assert len(read) - before <= before / 2, "another goal reads few new candidates"
