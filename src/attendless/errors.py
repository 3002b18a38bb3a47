"""Errors that a user can correct: they state what was given, what was expected and what exists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

#: Up to this many names an error lists them all. A recipe has about fifty fields.
LISTED = 60


#: Characters that move a terminal's cursor, change its state, turn the direction of a text or cannot be encoded.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(ValueError):
    """An error that the caller can correct. The command line prints it on one line and exits with 2.

    Args:
        message: What was given, what was expected and what to do. Control characters are replaced.
    """

    def __init__(self, message: str) -> None:
        # Messages quote files, which may hold escape sequences. Errors of workers have several lines.
        super().__init__("\n".join(map(printable, str(message).split("\n"))))


def printable(found: Any) -> Any:
    """The same text, or JSON value, with a replacement character for each control character in its texts."""
    if isinstance(found, str):
        return _CONTROL.sub("\ufffd", found)
    if isinstance(found, dict):
        return {printable(key): printable(value) for key, value in found.items()}
    return list(map(printable, found)) if isinstance(found, list) else found


def unknown(kind: str, given: str, exist: Iterable[str]) -> UserError:
    """The error for a name that does not exist: the closest names that do, and all of them up to `LISTED`."""
    names = sorted(exist)
    close = get_close_matches(given, names, n=5 if len(names) > LISTED else 1)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    listing = ", ".join(names) or "none"
    return UserError(f"unknown {kind} {given!r}.{hint} There are: {listing if len(names) <= LISTED else len(names)}")
