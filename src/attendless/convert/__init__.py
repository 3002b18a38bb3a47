"""Convert a pretrained model, patch it in place, save and load the result."""

from .conversion import convert, convert_with_report
from .files import load, save
from .patch import patch, unpatch
from .report import Report
from .source import open_model

__all__ = ["Report", "convert", "convert_with_report", "load", "open_model", "patch", "save", "unpatch"]
