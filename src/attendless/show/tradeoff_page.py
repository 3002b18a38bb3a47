"""The report of `tune` as one self-contained HTML page: the choice, the plot and the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..optimize.report import HOW_TO_READ, Tuned, table
from ..stamp import stamp, stamp_line
from .html import fill, style, template
from .tradeoff import svg


def page(found: Sequence[Tuned], title: str, commands: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The page for one or more sizes; `commands` are the `convert` commands of the chosen models."""
    chosen = [
        "".join(f"<p>{escape(line)}</p>" for line in tuned.findings) + f"<pre>{escape(command)}</pre>"
        for tuned, command in zip(found, commands, strict=True)
    ]
    parts = {
        "style": style(),
        "title": escape(title),
        "findings": "\n".join(chosen),
        "figure": svg(found),
        "table": _table(found),
        "notes": "\n".join(f'<p class="note">{escape(line)}</p>' for line in (*HOW_TO_READ, *notes)),
        "stamp": escape(stamp_line(stamp())),
    }
    return fill(template("tradeoff.html"), parts)


def _table(found: Sequence[Tuned]) -> str:
    heads, *rows = table(found)
    kinds = [' class="text"' if head in ("attention", "reducer") else "" for head in heads]
    lines = ["<tr>" + "".join(f"<th{kind}>{head}</th>" for kind, head in zip(kinds, heads, strict=True)) + "</tr>"]
    for row in rows:
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        lines.append(f'<tr class="best">{cells}</tr>' if row[-1] == "chosen" else f"<tr>{cells}</tr>")
    return f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"
