"""Mechanisms: one file each, holding the equation, the function, the thin module and its cost."""

import sys

from ..options import (
    Options,
    Spec,
    join,
    join_stages,
    option,
)
from ..plugins import import_package
from ..sparse.backend import Choice
from .interface import Attention
from .registry import (
    aliases,
    attention_class,
    attentions,
    create,
    expand,
    expand_stages,
    named,
    parse,
    register,
    register_alias,
)
from .values import Context, Grid, Macs, cap

import_package(sys.modules[__name__])

__all__ = [
    "Attention",
    "Choice",
    "Context",
    "Grid",
    "Macs",
    "Options",
    "Spec",
    "aliases",
    "attention_class",
    "attentions",
    "cap",
    "create",
    "expand",
    "expand_stages",
    "join",
    "join_stages",
    "named",
    "option",
    "parse",
    "register",
    "register_alias",
]
