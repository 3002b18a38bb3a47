"""Vision Transformers that attend less, and are measurably faster for it."""

from .attention import Attention, Context, Grid, Options, attentions, create, option, register
from .backbones import Columnar, Pyramid
from .convert import convert, load, open_model, save
from .errors import UserError
from .measure.bench import bench
from .measure.tune import tune
from .plugins import load_plugin
from .sparse import Case, Executor, execution, register_executor
from .version import __version__

__all__ = [
    "Attention",
    "Case",
    "Columnar",
    "Context",
    "Executor",
    "Grid",
    "Options",
    "Pyramid",
    "UserError",
    "__version__",
    "attentions",
    "bench",
    "convert",
    "create",
    "execution",
    "load",
    "load_plugin",
    "open_model",
    "option",
    "register",
    "register_executor",
    "save",
    "tune",
]
