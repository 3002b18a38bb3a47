"""Benchmarks are run by hand; what they import must exist all the same."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
#: What others import is not run itself.
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "study")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    assert "main" in runpy.run_path(str(path), run_name="imported")
