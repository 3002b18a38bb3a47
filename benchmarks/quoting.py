"""Numbers in pages: what a command measured stands between two marks, and the command puts it there.

A test makes each block again from its results file and compares, so that no page says anything else.
"""

from __future__ import annotations

from pathlib import Path

from attendless_cli.output import write_text


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by a command -->", f"<!-- /{name} -->"


def between(text: str, name: str) -> str:
    """What stands between the marks."""
    begin, end = marks(name)
    return text.partition(begin)[2].partition(end)[0].strip()


def quote(page: Path, name: str, block: str) -> None:
    """Put `block` between the marks of `page`, which must be there."""
    begin, end = marks(name)
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no place for {name}: expected {begin} and {end}")
    write_text(page, f"{before}{begin}\n{block}\n{end}{after}")
