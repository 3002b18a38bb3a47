"""Vision Transformers that attend less, and are measurably faster for it."""

from .attention import Attention, Context, Grid, Options, attentions, create, load_plugin, option, register
from .backbones import Columnar
from .errors import UserError

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Columnar",
    "Context",
    "Grid",
    "Options",
    "UserError",
    "attentions",
    "create",
    "load_plugin",
    "option",
    "register",
]
