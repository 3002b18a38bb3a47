"""Detection and segmentation. Names are imported on first use, so that importing attendless imports no detector."""

import importlib
from typing import TYPE_CHECKING, Any

from torch import nn

from ..convert.files import register_task

if TYPE_CHECKING:
    from .draw import predict
    from .evaluating import evaluate
    from .features import extractor
    from .mmseg import load_mmseg
    from .model import Dense, build
    from .training import train

_HOMES = {
    "Dense": "model",
    "build": "model",
    "evaluate": "evaluating",
    "extractor": "features",
    "load_mmseg": "mmseg",
    "predict": "draw",
    "train": "training",
}
__all__ = ["Dense", "build", "evaluate", "extractor", "load_mmseg", "predict", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def _restore(backbone: nn.Module, about: dict[str, Any]) -> nn.Module:
    from .model import restore

    return restore(backbone, about)


for _task in ("detection", "segmentation"):
    register_task(_task, _restore)
