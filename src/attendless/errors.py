"""The one kind of error a user causes: it says what was given, what was expected and what exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: Up to this many names an error lists them all. A recipe has about fifty fields.
LISTED = 60


class UserError(ValueError):
    """Something the caller can put right. The command line prints it on one line and exits with 2."""


def unknown(kind: str, given: str, exist: Iterable[str]) -> UserError:
    """The error for a name that does not exist: the closest names that do, and all of them up to `LISTED`."""
    names = sorted(exist)
    close = get_close_matches(given, names, n=5 if len(names) > LISTED else 1)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    listing = ", ".join(names) or "none"
    return UserError(f"unknown {kind} {given!r}.{hint} There are: {listing if len(names) <= LISTED else len(names)}")
