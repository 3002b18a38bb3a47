"""The page of all tables and the pages of the studies are what the commands print, and nothing in them is typed in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attendless_lab.papers import page, study_page, table, tables
from attendless_lab.papers.study import studies
from attendless_lab.papers.table import Row

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: Those whose models take long to build.
LONG = (
    "fair-comparison",
    "lavit-2",
    "lavit-3",
    "lavit-4",
    "lavit-extensibility",
    "sparsifiner-1",
    "sparsifiner-figure-4",
)
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in tables()]
WANTED = {
    *(f"bbvit-{name}" for name in ("1", "2", "3", "figure-1")),
    *(f"lavit-{name}" for name in ("2", "3", "4", "extensibility", "ablation", "figure-1")),
    *("fair-comparison", "fair-comparison-complexity"),
    *(f"sparsifiner-{number}" for number in range(1, 5)),
    *(f"sparsifiner-figure-{number}" for number in range(1, 8)),
}


def test_every_table_and_figure_is_there() -> None:
    assert set(tables()) == WANTED
    assert all(one.here for one in tables().values())


@pytest.mark.parametrize("name", EVERY)
def test_the_page_is_up_to_date(name: str) -> None:
    """`attendless papers --markdown > docs/papers.md` writes it."""
    asked = table(name)
    rows = list(asked.build())
    text = (DOCS / "papers.md").read_text()
    assert f"\n## {name}\n{page.section(asked, rows)}" in text
    assert f"| [{name}](#{name}) | {asked.title} | {'; '.join(asked.here)} | {page.agreement(rows)} |" in text


@pytest.mark.parametrize("name", EVERY)
def test_a_row_without_a_number_of_ours_says_why(name: str) -> None:
    assert all(row.note for row in table(name).build() if row.ours is None)


def test_the_page_begins_with_what_there_is() -> None:
    text = (DOCS / "papers.md").read_text()
    assert text.startswith(page.INTRODUCTION)
    assert text.count("\n## ") == len(tables())


def test_rows_as_they_are_printed() -> None:
    assert page.cells(Row("a", "FLOPs", "G", "1.5", 1.46e9)) == ("a", "FLOPs", "1.5 G", "1.5 G", "yes", "")
    assert page.cells(Row("a", "top-1", "%", "79.4", None, "why")) == ("a", "top-1", "79.4 %", "–", "–", "why")
    assert page.cells(Row("a", "tokens", "tokens", "", 3136)) == ("a", "tokens", "–", "3,136 tokens", "–", "")
    assert page.agreement([Row("a", "x", "M", "1", 2e6), Row("a", "y", "M", "2", 2e6)]).startswith("1 of 2 ")


@pytest.mark.parametrize("name", [study.name for study in studies().values()])
def test_a_studys_page_is_made_from_its_results(name: str) -> None:
    results = json.loads((DOCS / "results" / f"{name}.json").read_text())
    assert (DOCS / f"{name}.md").read_text() == study_page.page(results)
    asked = next(study for study in studies().values() if study.name == name)
    assert results["recipe"] == asked.recipe
    assert [(row["part"], row["row"]) for row in results["rows"]] == [
        (part.title, entry.row) for part in asked.parts for entry in part.entries
    ]
    assert (DOCS / "results" / f"{name}.png").is_file() == any(row["runs"] for row in results["rows"])
