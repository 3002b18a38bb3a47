"""The frame of every paper's table: printed values as data, our values by counting or measuring, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from attendless.errors import unknown

#: What a printed number is a multiple of.
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


#: Units of what is counted in ones.
_WHOLE = ("tokens", "keys", "layers")


@dataclasses.dataclass(frozen=True)
class Row:
    """One printed number: whose (`row`), what (`quantity`), as printed (`paper`), and ours as a raw count or measure.

    `agrees` says whether ours rounds to the printed digits; it is None where we have no value of our own, and where it
    is another machine's. What is not printed at all is empty.
    """

    row: str
    quantity: str
    unit: str
    paper: str
    ours: float | int | None = None
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        if self.ours is None or not self.paper or self.unit == "images/s":  # another machine's
            return None
        return self.ours_text == self.paper

    @property
    def ours_text(self) -> str:
        """Our value in the paper's unit, with as many digits as the paper prints."""
        if self.ours is None:
            return "–"
        if not self.paper:
            value = self.ours / UNITS[self.unit]
            return f"{value:,.0f}" if self.unit in _WHOLE else f"{value:.1f}"
        step = Decimal(1).scaleb(Decimal(self.paper).as_tuple().exponent)  # type: ignore[arg-type]
        return str((Decimal(repr(float(self.ours))) / Decimal(UNITS[self.unit])).quantize(step, ROUND_HALF_EVEN))

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "agrees": self.agrees}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or figure of a paper as a command. `rules` say how our numbers are counted; `build` makes the rows,
    `time` those that are measured on this machine, if there are any. `here` says what of it can be reproduced where
    attendless runs, and what would need more."""

    name: str
    title: str
    source: str
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
