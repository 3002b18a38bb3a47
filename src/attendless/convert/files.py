"""A model in one file: `save` and `load`.

The file is safetensors: the weights under timm's names, and in its header, as JSON, all it takes to build the model
again: backbone, constructor's arguments, the attention of every layer, what the conversion decided, how images are to be
prepared, and a digest of the whole. So `load` needs nothing else, computes the same function on any machine, and tells
a damaged file from a sound one. Nothing is ever unpickled. Attentions from users' own files are not in it: it names
the files it needs.
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
from ..errors import UserError, unknown
from ..integrations.rebuild.architecture import Blueprint, blueprint
from ..integrations.weights import check_finite
from ..plugins import source_of
from ..sizes import image_config
from ..storage import read_described, write_described
from ..tokens import Reducer, reducers
from .report import Report

#: Files of models that reduce tokens have format 2, those with foveal attention 3, those of detectors and segmentors 4:
#: one who reads less would build another model. Before 3 foveal attention had no first order, so specs in such files do
#: not say that there is none.
FORMAT = 4
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
#: What a file may hold but a classifier: the name of a task → the model, given its backbone and what the file says.
_TASKS: dict[str, Callable[[Any, dict[str, Any]], nn.Module]] = {}


def register_task(name: str, build: Callable[[Any, dict[str, Any]], nn.Module]) -> None:
    """Let files hold models for another task than classification. Such a model has `task` and `plan()`: the blueprint
    of its backbone, and what `build` needs to know, as JSON, under `name` the task's."""
    _TASKS[name] = build


def plan_of(model: Any) -> tuple[Blueprint, dict[str, Any] | None]:
    """What a file says to have a model built again: its blueprint, or its backbone's and what is on it."""
    return model.plan() if hasattr(model, "task") else (blueprint(model), None)


def save(model: nn.Module, path: str | Path, *, report: Report | None = None) -> None:
    """Write `model` to `path`, whole or not at all; `report`, of its conversion, is kept with it."""
    from ..version import __version__

    plan, task = plan_of(model)
    header = {
        "format": FORMAT if task else _format(plan),
        "versions": {"attendless": __version__, "timm": timm.__version__, "torch": torch.__version__},
        **plan.as_dict(),
        **({"task": task} if task else {}),
        "plugins": _plugins(model),
        "preparation": _preparation(model),
        "conversion": None if report is None else report.as_dict(),
    }
    write_described(path, _KEY, json.dumps(header), _tensors(model))


def load(path: str | Path) -> Any:
    """The model saved in `path`, on the CPU and in evaluation mode."""
    text, tensors = _read(path)
    header = _header(path, text)
    _check_plugins(path, header)
    try:
        model = _on_task(Blueprint.from_dict(header).build(), header.get("task"))
    except UserError as error:
        raise UserError(f"{str(path)!r} cannot be built here: {error}") from None
    except Exception as error:  # a header that lies can make constructors fail in any way
        raise UserError(f"{str(path)!r} does not describe a model that can be built: {error!r}") from None
    _check_names(path, model.state_dict(), tensors)
    check_finite(tensors.items(), f"the weights in {str(path)!r} are damaged")
    # Copies, because a file's bytes lie in memory as they come, and unaligned weights may round differently.
    model.load_state_dict({name: value.clone() for name, value in tensors.items()}, assign=True)
    preparation = {k: tuple(v) if isinstance(v, list) else v for k, v in header.get("preparation", {}).items()}
    model.pretrained_cfg = model.default_cfg = preparation
    return model.eval()


def read_header(path: str | Path) -> dict[str, Any]:
    """What a saved file says of itself, without building the model."""
    return _header(path, _read(path)[0])


def _format(plan: Blueprint) -> int:
    if any(_name(text) in _SINCE_3 for text in plan.attention):
        return 3
    return 2 if plan.tokens else 1


def _name(spec: object) -> str:
    return str(spec).partition(":")[0]


def _as_meant(header: dict[str, Any]) -> dict[str, Any]:
    """A header of an older format with its specs in today's words: what was left out may mean something else by now."""
    layers = header.get("attention")
    if int(header["format"]) >= 3 or not isinstance(layers, list):
        return header
    return header | {"attention": [_completed(text) for text in layers]}


def _completed(text: Any) -> Any:
    more = _SINCE_3.get(_name(text))
    return text if more is None else f"{text},{more}" if ":" in text else f"{text}:{more}"


def _on_task(backbone: Any, about: dict[str, Any] | None) -> Any:
    if about is None:
        return backbone
    if about["name"] not in _TASKS:
        raise unknown("task", str(about["name"]), _TASKS)
    return _TASKS[about["name"]](backbone, about)


def _preparation(model: nn.Module) -> dict[str, Any]:
    """What the model says of its images and classes; of the classes only what is true of the classifier it has now."""
    cfg = {key: value for key, value in image_config(model).items() if key in _PREPARATION}
    classes = getattr(model, "num_classes", None)
    if classes is not None:
        cfg["num_classes"] = classes
    if len(cfg.get("label_names", ())) != classes:
        cfg.pop("label_names", None)
    return cfg


def _plugins(model: nn.Module) -> dict[str, str]:
    """The attentions and reducers in a model that are not ours, and the name of the file each came from."""
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
    """The weights, each with memory of its own: safetensors stores no sharing."""
    weights = model.state_dict()
    if empty := next((name for name, value in weights.items() if value.is_meta), None):
        raise UserError(f"this {type(model).__name__} has no weights to save yet: {empty} is on the meta device")
    return {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}


def _read(path: str | Path) -> tuple[str, dict[str, Tensor]]:
    otherwise = "holds weights but does not say of which model: give the model's name, and this file as its weights"
    return read_described(path, _KEY, otherwise)


def _header(path: str | Path, text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
        version = int(header["format"])
        sound = all(isinstance(header.get(name, {}), dict) for name in ("versions", "plugins", "preparation"))
    except (ValueError, TypeError, KeyError, OverflowError):
        sound = False
    if not sound:
        raise UserError(f"{str(path)!r} has a header that cannot be read")
    if version > FORMAT:
        written = header.get("versions", {}).get("attendless", "a newer version")
        raise UserError(
            f"{str(path)!r} was written by attendless {written} in format {version}; this one reads up to {FORMAT}"
        )
    return _as_meant(header)


def _check_names(path: str | Path, own: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    wrong = [f"{name} is missing" for name in own.keys() - found.keys()]
    wrong += [f"{name} is unexpected" for name in found.keys() - own.keys()]
    wrong += [
        f"{name} is {tuple(found[name].shape)}, not {tuple(own[name].shape)}"
        for name in own.keys() & found.keys()
        if own[name].shape != found[name].shape
    ]
    if wrong:
        raise UserError(f"{str(path)!r}: its weights do not fit the model it describes: {sorted(wrong)[0]}")
