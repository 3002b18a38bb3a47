"""The log that lets an interrupted search resume.

The log is a file of JSON lines, one for each measured value. The file name contains a digest of everything that the
values depend on: the model, the images, the machine and the library's version. A search of the same model with another
goal therefore reuses the values, and a search of another model does not.
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


class ResumeLog:
    """Measured values by name; `key` identifies the log. Without a folder the values live in memory only."""

    def __init__(self, folder: str | Path | None = None, digest: str = "") -> None:
        self.key = digest[:16]
        self.path = Path(folder) / f"tune-{self.key}.jsonl" if folder is not None else None
        self.values: dict[str, Any] = {}
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{str(folder)!r} cannot hold the log of a search: {error}") from None
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the process stopped while it wrote this line
                continue
            if isinstance(entry, dict) and "name" in entry:
                self.values[entry["name"]] = entry["value"]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The logged value; if there is none, call `measure`, which returns a JSON value, and log its result."""
        if name not in self.values:
            self.values[name] = measure()
            if self.path is not None:
                # The leading newline ends a line that a crash left incomplete.
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("\n" + json.dumps({"name": name, "value": self.values[name]}) + "\n")
        return self.values[name]


def digest_of(model: nn.Module, images: Tensor, text: str) -> str:
    """A digest of everything that measurements depend on: weights, images, machine, threads, versions and `text`."""
    here = stamp()
    machine = {name: here[name] for name in sorted(here) if name != "date"}
    return digest(f"{text} {json.dumps(machine, sort_keys=True)}", {**model.state_dict(), "its images": images})
