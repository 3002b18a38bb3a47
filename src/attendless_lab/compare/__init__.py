"""The fair comparison: attentions trained and measured under identical conditions, and the report of it."""

from .contest import compare

__all__ = ["compare"]
