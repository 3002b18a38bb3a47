"""Every table of the four papers as a command: the printed numbers beside our own."""

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
