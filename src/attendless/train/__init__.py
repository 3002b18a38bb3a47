"""Training and distillation. Names are imported on first use, so that a recipe does not import the training loop."""

import importlib
from typing import Any

_HOMES = {
    "RECIPES": "recipe",
    "Recipe": "recipe",
    "Result": "training",
    "Run": "recipe",
    "distill": "distilling",
    "train": "training",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
