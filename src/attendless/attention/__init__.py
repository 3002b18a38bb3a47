"""Mechanisms: one file each, holding the equation, the function, the thin module and its cost."""

import sys

from .contract import Attention, Choice, Context, Grid, Macs
from .registry import attentions, create, expand, expand_stages, load_plugin, parse, register, register_package
from .spec import Options, Spec, join, join_stages, option

register_package(sys.modules[__name__])

__all__ = [
    "Attention",
    "Choice",
    "Context",
    "Grid",
    "Macs",
    "Options",
    "Spec",
    "attentions",
    "create",
    "expand",
    "expand_stages",
    "join",
    "join_stages",
    "load_plugin",
    "option",
    "parse",
    "register",
]
