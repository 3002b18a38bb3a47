"""A pretrained model → the same model attending less."""

from .rebuild import convert
from .source import open_model

__all__ = ["convert", "open_model"]
