"""What a long search has measured, written down as it goes, so that one that was stopped goes on where it was.

A file of JSON lines, one for each thing measured. Its name holds a digest of all that the figures depend on: the model,
the images, the machine. So nobody is told of another's, and a search with another bound finds what this one measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from ..stamp import stamp
from ..storage import digest


class Notes:
    """Measured values by what they are of. Without a folder they are kept for this search alone."""

    def __init__(self, folder: str | Path | None = None, of: str = "") -> None:
        self.path = Path(folder) / f"tune-{of[:16]}.jsonl" if folder is not None else None
        self.found: dict[str, Any] = {}
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{str(folder)!r} cannot hold the notes of a search: {error}") from None
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the line that was being written when it was stopped
                continue
            self.found[entry["of"]] = entry["found"]

    def get(self, of: str, measure: Callable[[], Any]) -> Any:
        """What was found of this before; otherwise it is measured (a JSON value), and written down at once."""
        if of not in self.found:
            self.found[of] = measure()
            if self.path is not None:
                # A line torn by a crash ends where the next one begins.
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("\n" + json.dumps({"of": of, "found": self.found[of]}) + "\n")
        return self.found[of]


def digest_of(model: nn.Module, images: Tensor, text: str) -> str:
    """A digest of all that measurements depend on: weights, images, the machine and its threads, and a text."""
    here = stamp()
    where = {name: here[name] for name in sorted(here) if name != "date"}
    return digest(f"{text} {json.dumps(where, sort_keys=True)}", {**model.state_dict(), "its images": images})
