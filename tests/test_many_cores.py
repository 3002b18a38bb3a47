"""The simulation of many cores: its schedule, and how the kernels divide the work of one head."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(name="script")
def many_cores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(FOLDER)
    return runpy.run_path(str(FOLDER / "many_cores.py"), run_name="imported")


@pytest.mark.parametrize(
    ("steps", "heads", "workers", "seconds"),
    [
        ([[1, 1], [2, 2]], 1, 1, 6),
        ([[1, 1], [2, 2]], 1, 2, 3),  # a step waits for the one before it
        ([[1, 1], [], [2, 2]], 1, 2, 3),
        ([[3], [1] * 6], 2, 4, 6),  # two workers wait while two prepare
        ([[1], [1]], 5, 2, 6),
        ([[1], [1] * 4], 3, 64, 2),
    ],
)
def test_the_schedule(script: dict[str, Any], steps: list[list[float]], heads: int, workers: int, seconds: int) -> None:
    assert script["finish"](steps, heads, workers) == seconds


def test_one_part_prepares_where_work_is_not_divided(script: dict[str, Any]) -> None:
    assert script["undivided"]([[1, 2], [3], [4, 5]]) == [[6], [4, 5]]


@pytest.mark.builds
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here")
def test_every_step_of_a_head_is_divided(script: dict[str, Any], tmp_path: Path) -> None:
    program = script["compiled"](tmp_path)
    assert [len(step) for step in script["measured"](program, 24, 1)][:3] == [1, 1, 1]
    divided = [len(step) for step in script["measured"](program, 24, 64)]
    assert min(divided) >= 4
    assert divided[3] == 37  # a tile in each part, and one part for the class token
