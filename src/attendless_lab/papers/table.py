"""The tables of the papers as data: each printed value beside ours, which is counted or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from attendless.errors import unknown

#: Unit of a printed number → its factor.
UNITS = {
    "": 1.0,
    "M": 1e6,
    "G": 1e9,
    "%": 1.0,
    "tokens": 1.0,
    "keys": 1.0,
    "layers": 1.0,
    "×": 1.0,
    "images/s": 1.0,
    "h": 3600.0,
}

#: Units of whole numbers.
_WHOLE = ("tokens", "keys", "layers")


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of a table.

    Args:
        row: the row of the paper's table, usually a model.
        quantity: what is counted, for example `"FLOPs"`.
        unit: a key of `UNITS`.
        paper: the value as the paper prints it; empty if the paper does not print it.
        ours: our count or measurement, without the unit's factor; None if we have none.
        note: reasons and remarks, separated by `"; "`.
        attention: the attention that we count, if the row is about one.
    """

    row: str
    quantity: str
    unit: str
    paper: str
    ours: float | int | None = None
    note: str = ""
    attention: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether our value rounds to the printed digits; None if there is nothing to compare."""
        if self.ours is None or not self.paper or self.unit == "images/s":  # measured on another machine
            return None
        return self.ours_text == self.paper

    @property
    def ours_text(self) -> str:
        """Our value in the paper's unit, with as many digits as the paper prints."""
        if self.ours is None:
            return "–"
        if not self.paper:
            value = self.ours / UNITS[self.unit]
            return f"{value:,.0f}" if self.unit in _WHOLE else f"{value:,.1f}"
        step = Decimal(1).scaleb(Decimal(self.paper).as_tuple().exponent)  # type: ignore[arg-type]
        return str((Decimal(repr(float(self.ours))) / Decimal(UNITS[self.unit])).quantize(step, ROUND_HALF_EVEN))

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "agrees": self.agrees}


@dataclasses.dataclass(frozen=True)
class Source:
    """A paper: the name of its page, a short title, its citation, and the introduction of its page (Markdown)."""

    name: str
    title: str
    citation: str
    introduction: str

    def __str__(self) -> str:
        return self.citation


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Args:
        name: the argument of `attendless papers`.
        title: the number and subject of the table.
        source: the paper.
        rules: how our values are counted.
        build: returns the counted rows.
        time: returns the rows that are measured on this machine; None if there are none.
        here: what attendless reproduces of the table, each as `"what"` or `"what: details"`.
    """

    name: str
    title: str
    source: Source
    rules: tuple[str, ...]
    build: Callable[[], Iterable[Row]]
    time: Callable[[], Iterable[Row]] | None = None
    here: tuple[str, ...] = ("counted",)


_TABLES: dict[str, Table] = {}


def register_table(table: Table) -> Table:
    _TABLES[table.name] = table
    return table


def tables() -> dict[str, Table]:
    return dict(sorted(_TABLES.items()))


def table(name: str) -> Table:
    if name not in _TABLES:
        raise unknown("table", name, _TABLES)
    return _TABLES[name]
