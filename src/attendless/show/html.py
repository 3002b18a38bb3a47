"""What the self-contained pages share: one style, light and dark, and templates whose places are filled once each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files


def style() -> str:
    return template("style.css")


def template(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def fill(text: str, parts: Mapping[str, str]) -> str:
    """The text with each part at its place, `{{ name }}`; what a part holds is never searched for places."""
    for name, part in parts.items():
        before, _, after = text.partition(f"{{{{ {name} }}}}")
        text = before + part + after
    return text
