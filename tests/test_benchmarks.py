"""Benchmarks are run by hand; what they import must exist all the same."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
#: What others import is not run itself.
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("study", "quoting"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    assert "main" in runpy.run_path(str(path), run_name="imported")


#: What a benchmark quotes in a page: its results file, the page, and the name of the place there.
QUOTES = {
    "front_page": ("docs/results/front-page.json", "README.md", "front-page"),
    "token_methods": ("docs/results/token-methods.json", "docs/results/tokens.md", "token-methods"),
    "demo": ("docs/results/compare.json", "docs/results/compare.md", "demo"),
}


@pytest.mark.parametrize("name", QUOTES)
def test_pages_quote_their_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block made anew from the results file is the block in the page, to the last digit."""
    monkeypatch.syspath_prepend(FOLDER)
    results, page, place = QUOTES[name]
    made = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="imported")
    between = runpy.run_path(str(FOLDER / "quoting.py"), run_name="imported")["between"]
    found = json.loads((FOLDER.parent / results).read_text())
    assert between((FOLDER.parent / page).read_text(), place) == made["block"](found)
