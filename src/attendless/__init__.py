"""Vision Transformers that attend less, and are measurably faster for it."""

from .attention import Attention, Context, Grid, Options, attentions, create, option, register
from .backbones import Columnar, Pyramid
from .convert import convert, load, open_model, save
from .errors import UserError
from .measure.bench import bench
from .measure.tune import tune
from .plugins import load_plugin
from .version import __version__

__all__ = [
    "Attention",
    "Columnar",
    "Context",
    "Grid",
    "Options",
    "Pyramid",
    "UserError",
    "__version__",
    "attentions",
    "bench",
    "convert",
    "create",
    "load",
    "load_plugin",
    "open_model",
    "option",
    "register",
    "save",
    "tune",
]
