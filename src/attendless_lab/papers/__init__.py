"""The tables of the four papers: the printed numbers beside our own counts."""

import sys

from attendless.plugins import import_package

from .table import (
    Row,
    Table,
    register_table,
    table,
    tables,
)

import_package(sys.modules[__name__])

__all__ = ["Row", "Table", "register_table", "table", "tables"]
