"""Vision Transformers that attend less, and are measurably faster for it."""

from . import dense, huggingface
from .attention import (
    Attention,
    Context,
    Grid,
    Options,
    attentions,
    create,
    option,
    register,
)
from .backbones import Columnar, Pyramid
from .check.run import check
from .convert import (
    convert,
    load,
    open_model,
    patch,
    save,
    unpatch,
)
from .errors import UserError
from .export import export
from .hub import from_hub, push_to_hub
from .integrations.support import register_family
from .maps import maps
from .measure.bench import bench
from .optimize.tune import tune
from .plugins import load_plugin
from .sparse import Backend, Case, execution, register_backend
from .tokens import Reducer, reducers, register_reducer
from .version import __version__

__all__ = [
    "Attention",
    "Backend",
    "Case",
    "Columnar",
    "Context",
    "Grid",
    "Options",
    "Pyramid",
    "Reducer",
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
    "reducers",
    "register",
    "register_backend",
    "register_family",
    "register_reducer",
    "save",
    "tune",
    "unpatch",
]
