"""Shared parts of self-contained HTML pages: the style (light and dark), templates and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files


def style() -> str:
    return template("style.css")


def template(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Replace each `{{ name }}` by its part; parts are not searched for further placeholders."""
    for name, part in parts.items():
        before, _, after = text.partition(f"{{{{ {name} }}}}")
        text = before + part + after
    return text


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[str] = ()) -> str:
    """An HTML table. Columns in `text` are text, others are numbers; a row that ends in `chosen` is emphasised."""
    kinds = [' class="text"' if head in text else "" for head in heads]
    lines = ["<tr>" + "".join(f"<th{kind}>{head}</th>" for kind, head in zip(kinds, heads, strict=True)) + "</tr>"]
    for row in rows:
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        lines.append(f'<tr class="best">{cells}</tr>' if row[-1] == "chosen" else f"<tr>{cells}</tr>")
    return f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"
