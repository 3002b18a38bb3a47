"""IMAGE|DIR… as the command line takes it: which files are meant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..data.folders import images_below
from ..errors import UserError


def find_pictures(places: Sequence[str | Path]) -> tuple[str, ...]:
    """Files as they are given, of folders every picture below them, sorted; each once."""
    found: dict[str, None] = {}
    for place in places:
        path = Path(place).expanduser()
        if path.is_dir():
            below = images_below(path, path)
            if not below:
                raise UserError(f"no images in {str(place)!r}")
            found |= dict.fromkeys(os.path.join(path, name) for name in below)
        elif path.is_file():
            found[str(path)] = None
        else:
            what = "is neither a file nor a folder" if os.path.lexists(path) else "no such image or folder"
            raise UserError(f"{str(place)!r}: {what}")
    if not found:
        raise UserError("no images were given: expected image files or folders of them")
    return tuple(found)
