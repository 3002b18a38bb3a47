"""The one rule for "attendless wrote this file": every kind of file holds a mark at a fixed place.

Commands replace a file without the mark of its kind only with `--force`. An empty file may be replaced. A
folder of results is marked by the description that its command writes there first.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from .storage import metadata

#: The key, name or value that every mark consists of.
MARK = "attendless"
#: Kind of file → its mark, where the format begins with it or holds it in one place. Figures and exported files are
#: named by their endings.
_PATTERNS = {
    "json": re.compile(rb'\s*\{\s*"stamp":\s*\{[^{}]*"attendless":'),
    "page": re.compile(rb'\s*<!doctype html>.{,1000}<meta name="generator" content="attendless">', re.DOTALL),
    ".png": re.compile(rb"\x89PNG\r\n\x1a\n.{,1000}tEXtSoftware\0attendless", re.DOTALL),
    ".svg": re.compile(rb"\s*<\?xml.{,3000}<dc:title>attendless</dc:title>", re.DOTALL),
    ".pdf": re.compile(rb"%PDF-.*/Creator \(attendless\)", re.DOTALL),
    ".xml": re.compile(rb'\s*<\?xml.*<attendless value="\{&quot;format&quot;: ', re.DOTALL),
    # An entry of the metadata in protobuf: field 1, a key of ten bytes, then field 2, the description.
    ".onnx": re.compile(rb'.*\n\nattendless\x12[\x80-\xff]*[\x00-\x7f]\{"format": ', re.DOTALL),
    ".so": re.compile(rb"\x7fELF.*attendless", re.DOTALL),
}


def is_ours(path: str | Path, kind: str) -> bool:
    """Whether attendless wrote this file, or the file is empty.

    Args:
        path: An existing file.
        kind: `model`, `json`, `page`, or the ending of a figure, an exported file or a library (`.png`, `.onnx`).
    """
    if os.path.getsize(path) == 0:
        return True
    if kind == "model":
        return MARK in metadata(path)
    if kind == ".pt2":
        return _is_our_archive(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _PATTERNS[kind].match(data) is not None


def not_ours(folder: str | Path, description: str, files: Iterable[str]) -> str | None:
    """The first of `files` that is in `folder` although the folder holds no `description` of the run that wrote it."""
    if os.path.isfile(os.path.join(folder, description)):
        return None
    return next((name for name in files if os.path.lexists(os.path.join(folder, name))), None)


def picture_mark(suffix: str) -> dict[str, str]:
    """The mark of a figure with this ending, as Matplotlib's `savefig(metadata=…)` takes it."""
    return {"Software" if suffix.lower() == ".png" else "Creator": MARK}


def _is_our_archive(path: str | Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(f"/extra/{MARK}") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
