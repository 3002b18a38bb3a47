"""Hosts: what attentions live in. Importing them registers our models in timm."""

from .columnar import Columnar, ColumnarDistilled
from .models import MODELS
from .pyramid import Pyramid

__all__ = ["MODELS", "Columnar", "ColumnarDistilled", "Pyramid"]
