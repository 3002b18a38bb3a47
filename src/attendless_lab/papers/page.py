"""Markdown of the papers' tables: an overview page, and one page per paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .layout import lay_out
from .table import Row, Source, Table

INTRODUCTION = """\
# Tables and figures of the four papers

After this page you can print every table of the four papers with our own counts beside the printed values.

```
attendless papers                          # list the tables and figures
attendless papers sparsifiner-2            # print one table
attendless papers bbvit-2 --time           # also measure its models on this machine
attendless papers --pages docs             # write this page and the pages of the papers
```

The commands compute every value of ours; none is typed in. *Agreement* counts the values of ours that round to the
printed digits. Values that depend on the machine (`--time`) are not on these pages.

To compare an attention of your own with these papers under equal conditions, see
[Your attention against the four papers](your-attention.md).
"""
READING = """\
Each column of printed values is followed by ours, where we have one. ≠ marks a value that does not round to the
printed digits; the footnote gives the reason.
"""


def heading(table: Table) -> str:
    return f"{table.source.title}, {table.title}"


def agreement(rows: Sequence[Row]) -> str:
    """How many of our values round to the printed digits."""
    checked = [row for row in rows if row.agrees is not None]
    return f"{sum(bool(row.agrees) for row in checked)} of {len(checked)}" if checked else "–"


def agreement_sentence(rows: Sequence[Row]) -> str:
    found = agreement(rows)
    if found == "–":
        return "The paper prints no value to compare with."
    return f"{found} counted values round to the printed digits."


def section(table: Table, rows: Sequence[Row]) -> str:
    """One table: its values, footnotes, counting rules, and what is reproduced."""
    parts = [f"**{table.title}**", ""]
    if rows:
        layout = lay_out(rows)
        parts += [markdown_table(layout.columns, layout.lines), "", agreement_sentence(rows), ""]
        parts += [f"- [{number}] {note}" for number, note in enumerate(layout.footnotes, start=1)]
    parts += [f"- {rule}" for rule in table.rules]
    parts.append(f"- reproduced here: {'; '.join(map(_command_as_code, table.here))}")
    return "\n".join(parts) + "\n"


def _command_as_code(text: str) -> str:
    what, _, details = text.partition(": ")
    return f"{what}: `{details}`" if details.startswith("attendless ") else text


def overview(built: Mapping[str, tuple[Table, Sequence[Row]]]) -> str:
    """The page that lists the tables of every paper."""
    parts = [INTRODUCTION]
    for source in _sources(table for table, _ in built.values()):
        mine = {name: found for name, found in built.items() if found[0].source == source}
        listing = [overview_line(table, rows) for table, rows in mine.values()]
        columns = ("table", "content", "reproduced here", "agreement")
        parts.append(f"## {source.title}\n[{source.citation}](papers/{source.name}.md)\n")
        parts.append(markdown_table(columns, listing) + "\n")
    return "\n".join(parts)


def overview_line(table: Table, rows: Sequence[Row]) -> tuple[str, ...]:
    link = f"[{table.name}](papers/{table.source.name}.md#{table.name})"
    return link, table.title, "; ".join(text.partition(":")[0] for text in table.here), agreement(rows)


def paper_page(source: Source, built: Mapping[str, tuple[Table, Sequence[Row]]]) -> str:
    """The tables of one paper."""
    parts = [f"# {source.title}: tables and figures\n", f"{source.citation}.\n", source.introduction, READING]
    parts += [f"## {name}\n{section(*found)}" for name, found in built.items() if found[0].source == source]
    return "\n".join(parts)


def pages(built: Mapping[str, tuple[Table, Sequence[Row]]]) -> dict[str, str]:
    """Path of each page below the folder of the documentation → its text."""
    found = {"papers.md": overview(built)}
    for source in _sources(table for table, _ in built.values()):
        found[f"papers/{source.name}.md"] = paper_page(source, built)
    return found


def _sources(tables: Iterable[Table]) -> list[Source]:
    return list(dict.fromkeys(table.source for table in tables))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
