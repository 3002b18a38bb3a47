"""Detection and segmentation. Names are looked up when asked for: importing attendless imports no detector."""

import importlib
from typing import Any

from ..convert.files import register_task

_HOMES = {
    "build": "model",
    "evaluate": "evaluating",
    "extractor": "features",
    "predict": "draw",
    "train": "training",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def _restore(backbone: Any, about: Any) -> Any:
    from .model import restore

    return restore(backbone, about)


for _task in ("detection", "segmentation"):
    register_task(_task, _restore)
