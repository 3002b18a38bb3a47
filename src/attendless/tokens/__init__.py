"""Token reducers, which drop or merge tokens: one file each."""

import sys

from ..plugins import import_package
from .calibrate import calibrate
from .interface import Reducer, SearchSpace
from .registry import (
    NONE,
    create_reducers,
    parse_tokens,
    reducers,
    register_reducer,
)

import_package(sys.modules[__name__])

__all__ = [
    "NONE",
    "Reducer",
    "SearchSpace",
    "calibrate",
    "create_reducers",
    "parse_tokens",
    "reducers",
    "register_reducer",
]
