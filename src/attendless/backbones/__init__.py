"""Backbones: models that hold attentions and token reducers. Importing them registers our models in timm."""

from typing import TypeGuard

from .base import Backbone
from .bbvit import BBViT
from .ceit import CeiT
from .columnar import Columnar, ColumnarDistilled
from .deepvit import DeepViT
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
    "DeepViT",
    "LVViT",
    "Pyramid",
    "Stemmed",
    "is_backbone",
]


def is_backbone(model: object) -> TypeGuard[Backbone]:
    """Whether a model is an attendless backbone: it passes the context and counts its cost per layer."""
    return isinstance(model, Backbone)
