"""Backbones: what attentions live in. Importing them registers our models in timm."""

from typing import Any

from .base import Backbone
from .bbvit import BBViT
from .ceit import CeiT
from .columnar import Columnar, ColumnarDistilled
from .lvvit import LVViT
from .models import MODELS
from .pyramid import Pyramid
from .stemmed import Stemmed

__all__ = [
    "MODELS",
    "BBViT",
    "Backbone",
    "CeiT",
    "Columnar",
    "ColumnarDistilled",
    "LVViT",
    "Pyramid",
    "Stemmed",
    "is_backbone",
]


def is_backbone(model: Any) -> bool:
    """Whether a model is one of our backbones: it passes the context and knows its own cost, layer by layer."""
    return isinstance(model, Backbone)
