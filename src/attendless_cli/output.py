"""Tables, progress and JSON: what commands print and write."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def width() -> int | None:
    """The width of the terminal, or the variable COLUMNS; None in a pipe or a file, where lines may have any length."""
    return shutil.get_terminal_size((0, 0)).columns or None


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, note: str = "") -> None:
    """A table on the terminal; the first column is text, the others numbers. Piped output keeps its full width."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i and column not in TEXT else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(table)
    if note:
        console.print(note, style="dim")


#: Columns that hold words rather than numbers.
TEXT = frozenset(
    {
        *("attention", "options", "why", "note", "backend", "value", "quantity", "source", "grid", "content"),
        *("description", "reproduced here"),
        *("computed by", "result", "verdict", "range", "against baseline", "reducer", "runtime", "recipe", "used by"),
    }
)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on the error stream how much of `total` is done and how long the rest will take: as a bar on a terminal, in
    a pipe or a log as a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(what, total).advance
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


class Lines:
    """Progress in a log: nothing of what is soon over; otherwise an estimate as soon as there is one, a line every ten
    seconds, and one at the end."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.total, self.clock = what, total, clock
        self.done, self.began = 0, clock()
        self.told: float | None = None

    def advance(self, done: int) -> None:
        ended = self.done >= self.total
        self.done += done
        taken = self.clock() - self.began
        left = taken * (self.total - self.done) / self.done if self.done else 0.0
        if self.told is None:
            due = self.done > 0 and taken >= SURE_AFTER and taken + left > LONG
        else:
            due = taken - self.told >= EVERY or self.done >= self.total
        if due and not ended:
            self.told = taken
            rest = f", about {duration(left)} left" if self.done < self.total else ""
            counts = f"{self.done:,}/{self.total:,}"
            print(f"{self.what} {counts}, {duration(taken)}{rest}", file=sys.stderr, flush=True)


#: Seconds: estimates begin after the first, are printed for jobs longer than the second, and renewed every third.
SURE_AFTER, LONG, EVERY = 2.0, 20.0, 10.0


def duration(seconds: float) -> str:
    """A duration as text, rounded: `24 s`, `3 min`, `2 h 10 min`."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """Say on the error stream what is being done: on a terminal as it begins; in a pipe or a log, where a line stays
    for good, once it is done, with the seconds it took."""
    shown, under_way = sys.stderr.isatty(), list[tuple[str, float]]()

    def done() -> None:
        for text, began in under_way:
            print(f"{text}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        under_way.clear()

    def say(text: str) -> None:
        if shown:
            print(f"… {text}", file=sys.stderr, flush=True)
            return
        done()
        under_way.append((text, time.monotonic()))

    yield say
    done()


def millions(count: float, digits: int = 2) -> str:
    return f"{count / 1e6:,.{digits}f} M"


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def write_json(path: str | None, payload: dict[str, Any]) -> None:
    """Write `{"stamp": …, **payload}` to `path`, whole or not at all. Nothing if no path was given."""
    if not path:
        return
    from attendless.stamp import stamp

    write_text(path, json.dumps({"stamp": stamp(), **payload}, indent=2, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Replace `path` atomically: a reader, or a crash, sees the old file or the new one."""
    from attendless.storage import atomic

    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
