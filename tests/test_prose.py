"""Plain English: documentation, messages, help, docstrings and comments use the field's terms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted(path for folder in ("src", "benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py"))

#: Phrase to avoid, and what to write instead.
BANNED = {
    r"sooner|quicker|how soon": "faster, lower latency",
    r"by turns|takes? turns": "interleaved",
    r"contestants?": "variants",
    r"points lost": "accuracy drop (percentage points)",
    r"same answers?": "top-1 agreement",
    r"not told apart": "not statistically significant",
    r"pictures?": "images",
    r"ms an image": "latency (ms per image)",
    r"images a second": "throughput (images/s)",
    r"executors?": "backend",
    r"dense (?:model|one)s?": "original model, baseline",
    r"32-bit floats?": "fp32",
    r"to the bit|bit for bit": "bit-identical",
    r"(?:it|that|which) (?:wants|minds|answers)": "requires, is unaffected by, returns",
    r"(?:is|are|be) told": "receives, is reported",
    r"sa(?:y|ys|id) so": "reports, logs a warning, raises",
    r"on the way back": "backward pass",
    r"by heart": "overfits",
    r"the clock says": "measured latency",
}
PATTERN = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in BANNED), re.IGNORECASE)


def instead_of(found: str) -> str:
    return next(words for phrase, words in BANNED.items() if re.fullmatch(phrase, found, re.IGNORECASE))


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings, and string literals that contain a space, each with the line where it starts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def complaints(where: str, lines: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"{where}:{number}: {found.group()!r}: write {instead_of(found.group())}"
        for number, text in lines
        for found in PATTERN.finditer(text)
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_are_plain(path: Path) -> None:
    found = complaints(path.name, iter(enumerate(path.read_text().splitlines(), 1)))
    assert not found, "\n".join(found)


def test_sources_are_plain() -> None:
    names = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
    found = [line for path, name in names.items() for line in complaints(name, prose(path.read_text()))]
    assert not found, "\n".join(found)


def test_a_phrase_is_found() -> None:
    source = '"""Times both by turns."""\nkey = "picture"\nsay("no Pictures here")  # quicker\n'
    assert complaints("x", prose(source)) == [
        "x:1: 'by turns': write interleaved",
        "x:3: 'Pictures': write images",
        "x:3: 'quicker': write faster, lower latency",
    ]
