"""Lay out a table as the papers do: one line per model, one or two columns per quantity, and notes as footnotes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .table import Row

#: Separates the notes of a row. Each note becomes one footnote of the table, however many rows have it.
SEPARATOR = "; "


@dataclasses.dataclass(frozen=True)
class Layout:
    """Column titles, lines of cells, and footnotes; the cells refer to footnote `i` as `[i + 1]`."""

    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    footnotes: tuple[str, ...]


class _Footnotes:
    """Numbers the notes in the order in which they are first used."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, text: str, notes: Sequence[str]) -> str:
        marks = [f"[{self.numbers.setdefault(note, len(self.numbers) + 1)}]" for note in notes]
        return " ".join([text, *marks])


def lay_out(rows: Sequence[Row]) -> Layout:
    """One line per `row.row`. A quantity has a column for the printed values and a column "ours", or only one of them.

    A note that all rows of a quantity share is marked once, in the column's title. Our value is preceded by ≠ where it
    does not round to the printed digits.
    """
    footnotes = _Footnotes()
    names = list(dict.fromkeys(row.row for row in rows))
    columns, cells = ["row"], [[name] for name in names]
    attentions = {row.row: row.attention for row in rows if row.attention}
    if attentions:
        columns.append("attention")
        for name, line in zip(names, cells, strict=True):
            line.append(attentions.get(name, "–"))
    for quantity in dict.fromkeys((row.quantity, row.unit) for row in rows):
        found = {row.row: row for row in rows if (row.quantity, row.unit) == quantity}
        shared = _shared(list(found.values()))
        printed = any(row.paper for row in found.values())
        ours = any(row.ours is not None for row in found.values())
        title = _title(*quantity)
        if printed:
            columns.append(footnotes.mark(title, shared))
        if ours:
            columns.append("ours" if printed else footnotes.mark(f"{title} (ours)", shared))
        for name, line in zip(names, cells, strict=True):
            line.extend(_cells(found.get(name), printed, ours, footnotes, shared))
    return Layout(tuple(columns), tuple(map(tuple, cells)), tuple(footnotes.numbers))


def _notes(row: Row) -> list[str]:
    return row.note.split(SEPARATOR) if row.note else []


def _shared(rows: Sequence[Row]) -> list[str]:
    """Notes of every row, if there is more than one row."""
    return [note for note in _notes(rows[0]) if len(rows) > 1 and all(note in _notes(row) for row in rows)]


def _title(quantity: str, unit: str) -> str:
    return quantity if not unit or unit in quantity.split() else f"{quantity}, {unit}"


def _cells(row: Row | None, printed: bool, ours: bool, footnotes: _Footnotes, shared: Sequence[str]) -> list[str]:
    """The printed value and ours; the notes of the row follow the last of them."""
    if row is None:
        return ["–"] * (printed + ours)
    cells = [row.paper or "–"] if printed else []
    if ours:
        cells.append(f"≠ {row.ours_text}" if row.agrees is False else row.ours_text)
    cells[-1] = footnotes.mark(cells[-1], [note for note in _notes(row) if note not in shared])
    return cells
