"""A folder that `attendless optimize` wrote: a model file and `manifest.json`, which names the file and its runtime."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..errors import UserError, printable

MANIFEST = "manifest.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Deployed:
    """The file to open, and the runtime and precision that it is for."""

    file: Path
    runtime: str
    precision: str


def deployed(path: str | Path) -> Deployed | None:
    """What a folder holds; None if `path` is no folder with a manifest."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        return None
    found = manifest(folder)
    name = found["file"]
    file = folder / name
    if Path(name).name != name or not file.is_file():
        raise UserError(f"{str(folder)!r} is damaged: its {MANIFEST} names {name!r}, which is not in the folder")
    return Deployed(file, found["runtime"], found["precision"])


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, as JSON."""
    try:
        found = printable(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        version = int(found["format"])
        named = all(isinstance(found[key], str) for key in ("file", "runtime", "precision"))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        named, version = False, 0
        found = {}
    if version > FORMAT:
        raise UserError(f"{str(folder)!r} is of format {version}; this attendless reads up to {FORMAT}")
    if not named:
        raise UserError(f"{str(folder)!r} is damaged: its {MANIFEST} cannot be read")
    return dict(found)


def model_file(path: str | Path) -> str:
    """MODEL as a file or name: the file that a folder's manifest names; anything else as it is."""
    found = deployed(path)
    return str(path if found is None else found.file)
