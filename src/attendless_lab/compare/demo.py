"""The demo: attentions compared under identical conditions, the model with full attention converted without training,
and one report of both. The data is generated, so nothing is downloaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attendless.errors import UserError
from attendless.storage import atomic

from .comparison import Results, compare, publish
from .conversion import Asked, convert_and_measure, headline
from .progress import Progress, silent
from .report import CONVERSION


@dataclasses.dataclass(frozen=True)
class Demo:
    """The results of both parts: the row of the conversion, and the comparison."""

    conversion: dict[str, Any]
    comparison: Results


def demo(
    out: str | Path = "attendless-out/demo",
    *,
    asked: Asked | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
    **comparison: Any,
) -> Demo:
    """Compare, convert, and write the report to `out`. Finished work in `out` is not repeated.

    `comparison` goes to `compare`. The model that is converted is the comparison's first with full attention.
    """
    say("1. attentions trained under identical conditions")
    compared = compare(out=out, say=say, progress=progress, **comparison)
    path = compared.out / CONVERSION
    if path.is_file():
        say("2. the conversion was measured before")
        found = json.loads(path.read_text())
    else:
        say("2. the model with full attention, converted without training")
        found = convert_and_measure(_trained(compared), asked or Asked(), say, progress)
        found["headline"] = headline(found)
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return Demo(found, publish(compared.out, compared.failed))


def _trained(compared: Results) -> Path:
    """The weights of the first run with full attention."""
    for row in compared.rows:
        if row["attention"] == "full" and row["runs"]:
            return compared.out / row["runs"][0]["folder"] / "last.safetensors"
    raise UserError("the demo converts the model with full attention, but none was trained: compare `full` too")
