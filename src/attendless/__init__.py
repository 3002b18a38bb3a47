"""Vision Transformers that attend less, and are measurably faster for it."""

from . import dense
from .attention import Attention, Context, Grid, Options, attentions, create, option, register
from .backbones import Columnar, Pyramid
from .convert import convert, load, open_model, patch, save, unpatch
from .convert import door as huggingface
from .errors import UserError
from .export import export
from .hub import from_hub, push_to_hub
from .maps import maps
from .measure.bench import bench
from .measure.contract import check
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
    "check",
    "convert",
    "create",
    "dense",
    "execution",
    "export",
    "from_hub",
    "huggingface",
    "load",
    "load_plugin",
    "maps",
    "open_model",
    "option",
    "patch",
    "push_to_hub",
    "register",
    "register_executor",
    "save",
    "tune",
    "unpatch",
]
