"""Benchmarks are run by hand; what they import must exist all the same."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
#: `study` is only imported by others.
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "study")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    assert "main" in runpy.run_path(str(path), run_name="imported")


def quoting() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "quoting.py"), run_name="imported")


@pytest.mark.parametrize("name", quoting()["QUOTES"])
def test_pages_quote_their_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table made anew from the results file is the table in the page, to the last digit."""
    monkeypatch.syspath_prepend(FOLDER)
    made = quoting()
    results, page, place = made["QUOTES"][name]
    found = json.loads((FOLDER.parent / results).read_text())
    assert made["between"]((FOLDER.parent / page).read_text(), place) == made["block_of"](name)(found)
