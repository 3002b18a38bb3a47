"""Save a model to one file, and load it.

The file is safetensors. It holds the weights under timm's names. Its header, as JSON, holds everything that builds the
model: backbone, constructor arguments, the attention of every layer, the report of the conversion, the preprocessing,
and a checksum. `load` needs nothing else, computes the same function on any machine, and detects a damaged file.
Nothing is unpickled. Attentions from users' plug-ins are not in the file; the header names the plug-in files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..attention import Attention, attentions
from ..errors import UserError, printable, unknown
from ..integrations.rebuild.architecture import Blueprint, blueprint
from ..integrations.rebuild.limits import at_most, layers_of
from ..integrations.weights import check_finite, other_kind
from ..plugins import source_of
from ..preparation import absurd
from ..sizes import image_config, set_image_config
from ..storage import read_described, write_described
from ..tokens import Reducer, reducers
from .report import Report

#: Format 2: models with token reduction; 3: with foveal attention; 4: detectors and segmentors; 5: token reduction in
#: models that keep their own layers. Older versions would silently build a different model. Before 3, foveal attention
#: had no first-order correction, so those files do not name the option.
FORMAT = 5
_SINCE_3 = {"foveal": "order=0"}
_KEY = "attendless"
_PREPARATION = (
    "architecture",
    "num_classes",
    "input_size",
    "mean",
    "std",
    "crop_pct",
    "crop_mode",
    "interpolation",
    "classifier",
    "first_conv",
    "label_names",
    "longest",
)
#: Tasks other than classification: name → function that builds the model from its backbone and the task's header.
_TASKS: dict[str, Callable[[nn.Module, dict[str, Any]], nn.Module]] = {}


def register_task(name: str, build: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> None:
    """Let files hold models for a task other than classification. Such a model has `task` and `plan()`, which returns
    the blueprint of its backbone and a JSON object for `build`, with the task as its `name`."""
    _TASKS[name] = build


def plan_of(model: Any) -> tuple[Blueprint, dict[str, Any] | None]:
    """The blueprint of a model or of its backbone, and the header of its task, if any."""
    return model.plan() if hasattr(model, "task") else (blueprint(model), None)


def save(model: nn.Module, path: str | Path, *, report: Report | None = None) -> None:
    """Write `model` to `path`; a failure leaves no partial file.

    Args:
        model: an attendless or timm model, or a detector or segmentor of attendless.
        path: the file to write, by custom `.safetensors`.
        report: the report of the conversion, stored in the header.

    Raises:
        UserError: no file can describe the model.
    """
    from ..version import __version__

    plan, task = plan_of(model)
    header = {
        "format": max(4, _format(plan)) if task else _format(plan),
        "versions": {"attendless": __version__, "timm": timm.__version__, "torch": torch.__version__},
        **plan.as_dict(),
        **({"task": task} if task else {}),
        "plugins": _plugins(model),
        "preparation": _preparation(model),
        "conversion": None if report is None else report.as_dict(),
    }
    write_described(path, _KEY, json.dumps(header), _tensors(model))


def load(path: str | Path) -> nn.Module:
    """Load a model that `save` wrote.

    Args:
        path: The file.

    Returns:
        The model, on the CPU and in evaluation mode: a `Columnar` or `Pyramid`, a timm model with attendless
        attentions, or a `dense.Dense`.

    Raises:
        UserError: the file is damaged, was written by a newer version or needs a plug-in.
    """
    text, tensors = _read(path)
    return _assemble(path, _header(path, text), tensors)


def _assemble(path: str | Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    """The model of a header, with the tensors of its file as weights."""
    _check_plugins(path, header)
    check_finite(tensors.items(), f"the weights in {str(path)!r} are damaged")
    try:
        model = _build(header, tensors)
    except UserError as error:
        raise UserError(f"{str(path)!r} cannot be built here: {error}") from None
    except Exception as error:  # constructors raise many types for wrong arguments
        told = repr(error)[:300]
        raise UserError(f"{str(path)!r} does not describe a model that can be built: {told}") from None
    # Copies, because tensors of a file may be unaligned in memory, and unaligned weights may round differently.
    model.load_state_dict({name: value.clone() for name, value in tensors.items()}, assign=True)
    preparation = {k: tuple(v) if isinstance(v, list) else v for k, v in header.get("preparation", {}).items()}
    set_image_config(model, preparation)
    return model.eval()


def _build(header: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    """Build the model of a header whose weights are the tensors of its file.

    The model is built on the meta device first and compared with the tensors, so that a small file cannot ask for more
    memory than its tensors take.
    """
    plan = Blueprint.from_dict(header)

    def build() -> nn.Module:
        with at_most(len(tensors)):
            return _on_task(plan.build(), header.get("task"))

    if layers_of(plan) > len(tensors):
        raise UserError(f"the header describes {layers_of(plan):,} layers, but the file holds {len(tensors):,} tensors")
    try:
        with torch.device("meta"):
            empty = build().state_dict()
    except (RuntimeError, NotImplementedError, UserError):  # some constructors read values of tensors
        empty = None
    if empty is not None:
        _check_names(empty, tensors)
    model = build()
    _check_names(model.state_dict(), tensors)
    return model


def read_header(path: str | Path) -> dict[str, Any]:
    """The header of a saved file."""
    return _header(path, _read(path)[0])


def _format(plan: Blueprint) -> int:
    if plan.tokens and plan.description.host == "timm":
        return 5
    if any(_name(text) in _SINCE_3 for text in plan.attention):
        return 3
    return 2 if plan.tokens else 1


def _name(spec: object) -> str:
    return str(spec).partition(":")[0]


def _as_meant(header: dict[str, Any]) -> dict[str, Any]:
    """Complete the specs in a header of an older format with options whose default has changed since."""
    layers = header.get("attention")
    if int(header["format"]) >= 3 or not isinstance(layers, list):
        return header
    return header | {"attention": [_completed(text) for text in layers]}


def _completed(text: Any) -> Any:
    more = _SINCE_3.get(_name(text))
    return text if more is None else f"{text},{more}" if ":" in text else f"{text}:{more}"


def _on_task(backbone: nn.Module, about: dict[str, Any] | None) -> nn.Module:
    if about is None:
        return backbone
    if about["name"] not in _TASKS:
        raise unknown("task", str(about["name"]), _TASKS)
    return _TASKS[about["name"]](backbone, about)


def _preparation(model: nn.Module) -> dict[str, Any]:
    """Preprocessing and classes of a model; label names only if they fit its present classifier."""
    cfg = {key: value for key, value in image_config(model).items() if key in _PREPARATION}
    classes = getattr(model, "num_classes", None)
    if classes is not None:
        cfg["num_classes"] = classes
    if len(cfg.get("label_names", ())) != classes:
        cfg.pop("label_names", None)
    return cfg


def _plugins(model: nn.Module) -> dict[str, str]:
    """The attentions and reducers in a model that come from plug-ins, each with the name of its file."""
    kinds = {type(module) for module in model.modules() if isinstance(module, Attention | Reducer)}
    return {kind.name: Path(source).name for kind in sorted(kinds, key=lambda k: k.name) if (source := source_of(kind))}


def _check_plugins(path: str | Path, header: dict[str, Any]) -> None:
    for name, file in header.get("plugins", {}).items():
        if name not in attentions() and name not in reducers():
            raise UserError(
                f"{str(path)!r} needs {name!r}, which came from the plug-in {file}: give it with "
                "--plugin FILE or import it first"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights, because safetensors does not store shared memory."""
    weights = model.state_dict()
    if empty := next((name for name, value in weights.items() if value.is_meta), None):
        raise UserError(f"this {type(model).__name__} has no weights to save yet: {empty} is on the meta device")
    return {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}


def _read(path: str | Path) -> tuple[str, dict[str, Tensor]]:
    otherwise = "holds weights but does not say of which model: give the model's name, and this file as its weights"
    return read_described(path, _KEY, otherwise)


def _header(path: str | Path, text: str) -> dict[str, Any]:
    try:
        header = printable(json.loads(text))
        version = int(header["format"])
        sound = all(isinstance(header.get(name, {}), dict) for name in ("versions", "plugins", "preparation"))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"{str(path)!r} has a header that cannot be read")
    if version > FORMAT:
        written = header.get("versions", {}).get("attendless", "a newer version")
        raise UserError(
            f"{str(path)!r} was written by attendless {written} in format {version}; this one reads up to {FORMAT}"
        )
    if why := absurd(header.get("preparation", {})):
        raise UserError(f"{str(path)!r} has a header that cannot be used: {why}")
    return _as_meant(header)


def _check_names(own: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    wrong = [f"{name} is missing" for name in own.keys() - found.keys()]
    wrong += [f"{name} is unexpected" for name in found.keys() - own.keys()]
    wrong += [
        f"{name} is {tuple(found[name].shape)}, not {tuple(own[name].shape)}"
        for name in own.keys() & found.keys()
        if own[name].shape != found[name].shape
    ]
    wrong += other_kind(own, found)
    if wrong:
        raise UserError(f"its weights do not fit the model it describes: {sorted(wrong)[0]}")
