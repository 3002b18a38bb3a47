"""Benchmarks are run by hand; what they import must exist all the same."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).resolve().parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports(path: Path) -> None:
    assert "main" in runpy.run_path(str(path), run_name="imported")
