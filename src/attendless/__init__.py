"""Make pretrained Vision Transformers faster on CPUs, without retraining.

The public API is `__all__` of this package, of `attendless.dense`, `attendless.huggingface`, `attendless.tokens` and
`attendless.sparse`, and the names in docs/reference.md. All other modules are internal: they may change in any version.
"""

from . import dense, huggingface
from .attention import (
    Attention,
    Context,
    Grid,
    Macs,
    Options,
    Spec,
    attentions,
    create,
    option,
    register,
)
from .backbones import Backbone, Columnar, Pyramid
from .check.run import check
from .convert import (
    Report,
    convert,
    convert_with_report,
    load,
    open_model,
    patch,
    save,
    unpatch,
)
from .errors import UserError
from .export import Exported, export
from .hub import from_hub, push_to_hub
from .integrations.support import register_family
from .maps import Map, maps
from .measure.bench import bench
from .measure.measurement import Measurement
from .optimize.optimize import optimize
from .optimize.optimized import Optimized
from .optimize.report import Tuned
from .optimize.tune import tune
from .plugins import load_plugin
from .sparse import Backend, Case, execution, register_backend
from .tokens import Reducer, SearchSpace, reducers, register_reducer
from .version import __version__

__all__ = [
    "Attention",
    "Backbone",
    "Backend",
    "Case",
    "Columnar",
    "Context",
    "Exported",
    "Grid",
    "Macs",
    "Map",
    "Measurement",
    "Optimized",
    "Options",
    "Pyramid",
    "Reducer",
    "Report",
    "SearchSpace",
    "Spec",
    "Tuned",
    "UserError",
    "__version__",
    "attentions",
    "bench",
    "check",
    "convert",
    "convert_with_report",
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
    "optimize",
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
