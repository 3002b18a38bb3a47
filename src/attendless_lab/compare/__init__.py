"""`compare`: train and measure attentions under identical conditions, and write a report."""

from .comparison import compare

__all__ = ["compare"]
