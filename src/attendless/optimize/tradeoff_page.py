"""The report of `tune` as one self-contained HTML page: the choice, the plot and the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..show.html import fill, style, table_html, template
from ..stamp import stamp, stamp_line
from .report import HOW_TO_READ, Tuned, table
from .tradeoff import svg


def page(found: Sequence[Tuned], title: str, commands: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The page for one or more sizes; `commands` are the `convert` commands of the chosen models."""
    heads, *rows = table(found)
    chosen = [
        "".join(f"<p>{escape(line)}</p>" for line in tuned.findings) + f"<pre>{escape(command)}</pre>"
        for tuned, command in zip(found, commands, strict=True)
    ]
    parts = {
        "style": style(),
        "title": escape(title),
        "findings": "\n".join(chosen),
        "figure": svg(found),
        "table": table_html(heads, rows, text=("attention", "reducer")),
        "notes": "\n".join(f'<p class="note">{escape(line)}</p>' for line in (*HOW_TO_READ, *notes)),
        "stamp": escape(stamp_line(stamp())),
    }
    return fill(template("tradeoff.html"), parts)
