"""The one kind of error a user causes: it says what was given, what was expected and what exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something the caller can put right. The command line prints it on one line and exits with 2."""


def unknown(kind: str, given: str, exist: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the ones that do and the likeliest first."""
    names = sorted(exist)
    close = get_close_matches(given, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UserError(f"unknown {kind} {given!r}.{hint} There are: {', '.join(names) or 'none'}")
