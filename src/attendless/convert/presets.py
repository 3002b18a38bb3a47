"""Presets: settings by name, for `convert(model, "fast")` and for quick searches.

A preset is an attention and a token schedule for an image size. Below 300 px, full attention is a small part of the
time, so presets merge tokens only; from 300 px they use foveal attention as well.
"""

from __future__ import annotations

from ..errors import unknown
from ..sizes import Size

#: Name → the token reducer, from most to least speed.
PRESETS = {
    "fast": "rank:keep=0.25,start=2",
    "balanced": "rank:keep=0.35,start=2",
    "safe": "rank:keep=0.5,start=2",
}
#: From this many pixels a side, presets use this attention too.
SPARSE_FROM, SPARSE = 300, "foveal:keep=0.1"


def preset(name: str, size: Size) -> tuple[str | None, str]:
    """The attention (None: the model's own) and the token reducer of a preset at an image size."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return SPARSE if min(size) >= SPARSE_FROM else None, PRESETS[name]
