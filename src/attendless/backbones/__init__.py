"""Hosts: what attentions live in. Importing them registers our models in timm."""

from typing import Any

from .bbvit import BBViT
from .ceit import CeiT
from .columnar import Columnar, ColumnarDistilled
from .host import Host
from .lvvit import LVViT
from .models import MODELS
from .pyramid import Pyramid
from .stemmed import Stemmed

__all__ = ["MODELS", "BBViT", "CeiT", "Columnar", "ColumnarDistilled", "Host", "LVViT", "Pyramid", "Stemmed", "is_host"]


def is_host(model: Any) -> bool:
    """Whether a model is one of our hosts: it passes the context and knows its own cost, layer by layer."""
    return isinstance(model, Host)
