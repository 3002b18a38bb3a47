"""Hosts: what attentions live in."""

from .columnar import Columnar, ColumnarDistilled

__all__ = ["Columnar", "ColumnarDistilled"]
