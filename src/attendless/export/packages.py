"""Third-party packages, imported where they are used, with a hint where they are missing and without telemetry.

OpenVINO and NNCF report their use to an analytics host, and keep an id in the home folder, unless the package
`openvino_telemetry` cannot be imported. ONNX Runtime keeps a device id and a database of events in the cache folder
unless `ORT_DISABLE_TELEMETRY` is set. Both decide when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..version import __version__

_TELEMETRY = "openvino_telemetry"
#: What a written file may depend on.
_NAMED = ("torch", "timm", "openvino", "onnxruntime", "nncf")


def need(extra: str, *names: str) -> Any:
    """The first of the packages, once all are there; `extra` is what installs them."""
    if why := missing(extra, *names):
        raise UserError(why)
    with without_telemetry():
        return importlib.import_module(names[0])


@contextlib.contextmanager
def without_telemetry() -> Iterator[None]:
    """Import packages inside without their telemetry. A process that has imported `openvino_telemetry` before keeps it,
    and a user's own value of `ORT_DISABLE_TELEMETRY` stays."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    modules: dict[str, Any] = sys.modules
    absent = _TELEMETRY not in modules
    if absent:
        modules[_TELEMETRY] = None  # importing it raises ImportError, for which OpenVINO and NNCF have a substitute
    try:
        yield
    finally:
        if absent:
            modules.pop(_TELEMETRY, None)


def missing(extra: str, *names: str) -> str:
    """Why they cannot be used; empty if they can."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: pip install 'attendless[{extra}]'" if absent else ""


def versions() -> dict[str, str]:
    """The versions of attendless and of the installed packages that write and run its files."""
    found = {"attendless": __version__}
    for name in _NAMED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
