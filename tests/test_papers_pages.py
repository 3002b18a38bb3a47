"""The pages of the papers and of the studies are the output of the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attendless_cli.main import main
from attendless_lab.papers import page, study_page, table, tables
from attendless_lab.papers.layout import lay_out
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
    """`attendless papers --pages docs` writes the pages."""
    asked = table(name)
    rows = list(asked.build())
    text = (DOCS / "papers" / f"{asked.source.name}.md").read_text()
    assert f"\n## {name}\n{page.section(asked, rows)}" in text
    assert f"| {' | '.join(page.overview_line(asked, rows))} |" in (DOCS / "papers.md").read_text()


@pytest.mark.parametrize("name", EVERY)
def test_a_row_without_our_value_has_a_note(name: str) -> None:
    assert all(row.note for row in table(name).build() if row.ours is None)


def test_each_page_has_its_introduction_and_tables() -> None:
    assert (DOCS / "papers.md").read_text().startswith(page.INTRODUCTION)
    for source in {one.source for one in tables().values()}:
        text = (DOCS / "papers" / f"{source.name}.md").read_text()
        assert source.introduction in text
        assert text.count("\n## ") == sum(one.source == source for one in tables().values())


def test_no_page_is_long_or_wide() -> None:
    for path in (DOCS / "papers.md", *(DOCS / "papers").iterdir()):
        lines = path.read_text().splitlines()
        assert len(lines) <= 260, path
        visible = [re.sub(r"\]\([^)]*\)", "]", line) for line in lines if line.startswith("|")]
        assert max(map(len, visible)) <= 200, path


def test_the_layout_of_a_table() -> None:
    rows = [
        Row("a", "FLOPs", "G", "1.5", 1.46e9),
        Row("a", "top-1", "%", "79.4", None, "why"),
        Row("b", "FLOPs", "G", "1.5", 1.6e9, "reason; other reason"),
        Row("b", "top-1", "%", "80.1", None, "reason; why"),
        Row("b", "tokens", "tokens", "", 3136, attention="full"),
    ]
    found = lay_out(rows)
    assert found.columns == ("row", "attention", "FLOPs, G", "ours", "top-1, % [3]", "tokens (ours)")
    assert found.lines == (
        ("a", "–", "1.5", "1.5", "79.4", "–"),
        ("b", "full", "1.5", "≠ 1.6 [1] [2]", "80.1 [1]", "3,136"),
    )
    assert found.footnotes == ("reason", "other reason", "why")
    assert page.agreement(rows) == "1 of 2"


def test_the_command_writes_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {name: table(name) for name in ("bbvit-1", "sparsifiner-4")}
    monkeypatch.setattr("attendless_lab.papers.tables", lambda: few)
    assert main(["papers", "--pages", str(tmp_path)]) in (0, None)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")} == {
        *("papers.md", "papers/bbvit.md", "papers/sparsifiner.md"),
    }
    for given, expected in ((["--markdown"], "use --pages DIR"), (["bbvit-1", "--pages", "d"], "must be left out")):
        with pytest.raises(SystemExit):
            main(["papers", *given])
        assert expected in capsys.readouterr().err


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
