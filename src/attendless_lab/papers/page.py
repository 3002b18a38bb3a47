"""Tables as Markdown: one, or all on a page that begins with what can be reproduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .table import Row, Table

COLUMNS = ("row", "quantity", "paper", "ours", "agrees", "note")
_AGREES = {True: "yes", False: "no", None: "–"}
INTRODUCTION = """\
# Every table and figure of the four papers

```
attendless papers                          # what there is, and what of it can be reproduced here
attendless papers sparsifiner-2            # one of them
attendless papers bbvit-2 --time           # with what is measured on this machine
attendless papers --markdown               # this page
```

Printed numbers stand beside our own, which a command has counted; none is typed in. *agrees* is whether ours rounds to
the printed digits. Where there is no number of ours, the note says why; known misprints are in the notes too. What is
measured on a machine (`--time`) is not on this page. What was trained at small scale: [BBViT](bbvit.md),
[the comparison](fair-comparison.md).
"""


def cells(row: Row) -> tuple[str, ...]:
    """A row as it is printed."""
    paper, ours = (f"{text} {row.unit}".strip() if text else "–" for text in (row.paper, row.ours_text))
    return row.row, row.quantity, paper, "–" if row.ours is None else ours, _AGREES[row.agrees], row.note


def heading(table: Table) -> str:
    return f"{table.title} · {table.source}"


def agreement(rows: Sequence[Row]) -> str:
    """How many of the counted numbers round to the printed digits."""
    checked = [row for row in rows if row.agrees is not None]
    if not checked:
        return "nothing printed to compare with"
    return f"{sum(bool(row.agrees) for row in checked)} of {len(checked)} counted numbers agree to the printed digits"


def section(table: Table, rows: Sequence[Row]) -> str:
    """One table."""
    lines = [
        f"**{heading(table)}**", "", markdown_table(COLUMNS, [cells(row) for row in rows]), "",
        *(f"- {rule}" for rule in table.rules), f"- {agreement(rows)}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def page(built: Mapping[str, tuple[Table, Sequence[Row]]]) -> str:
    """All tables, after a list of them."""
    listing = [
        (f"[{name}](#{name})", table.title, "; ".join(table.here), agreement(rows))
        for name, (table, rows) in built.items()
    ]
    parts = [INTRODUCTION, markdown_table(("table", "what it is", "here", "agreement"), listing) + "\n"]
    for name, (table, rows) in built.items():
        parts.append(f"## {name}\n{section(table, rows)}")
    return "\n".join(parts)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
