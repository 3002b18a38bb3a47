"""The image files that IMAGE|DIR… arguments refer to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..data.folders import images_below
from ..errors import UserError


def find_pictures(places: Sequence[str | Path]) -> tuple[str, ...]:
    """The given files, and all images below the given folders, sorted; each once.

    Raises:
        UserError: A path does not exist, or a folder contains no images.
    """
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
