"""Third-party packages, imported where they are used, with a hint where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..errors import UserError


def need(extra: str, *names: str) -> Any:
    """The first of the packages, once all are there; `extra` is what installs them."""
    if why := missing(extra, *names):
        raise UserError(why)
    return importlib.import_module(names[0])


def missing(extra: str, *names: str) -> str:
    """Why they cannot be used; empty if they can."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: pip install 'attendless[{extra}]'" if absent else ""
