"""The base of detectors and segmentors: a backbone's feature pyramid with a head, rebuilt from plain data.

A spec names a head as it names an attention: `retinanet`, `semantic_fpn:channels=64`, `upernet`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ..errors import UserError, unknown
from ..integrations.rebuild.architecture import Blueprint, blueprint
from ..integrations.weights import reset_classifier
from ..options import Options, Spec, parse_options
from ..sizes import image_config
from .features import Features

Task = Literal["detection", "segmentation"]
#: Head → its task, module and class. Heads need optional libraries, so their modules are imported on first use.
HEADS: dict[str, tuple[Task, str, str]] = {
    "retinanet": ("detection", "retinanet", "RetinaNet"),
    "semantic_fpn": ("segmentation", "segmentor", "SemanticFPN"),
    "upernet": ("segmentation", "segmentor", "UperNet"),
}
TASKS: tuple[Task, ...] = ("detection", "segmentation")
#: The default head of each task.
DEFAULT_HEADS: dict[str, str] = {"detection": "retinanet", "segmentation": "semantic_fpn"}


class Dense(nn.Module):
    """A detector or segmentor. Heads define their layers, `losses`, `decode` and `forward`."""

    task: ClassVar[Task]
    name: ClassVar[str]
    options: ClassVar[type[Options]]

    features: Features
    chosen: Any
    num_classes: int
    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]

    def losses(self, images: Tensor, targets: Any) -> dict[str, Tensor]:
        """Loss terms by name, including the losses that attentions define."""
        raise NotImplementedError(f"{type(self).__name__} does not define losses")

    def decode(self, levels: list[Tensor]) -> Any:
        """Apply the head to the four maps."""
        raise NotImplementedError(f"{type(self).__name__} does not define decode")

    @property
    def backbone(self) -> Any:
        return self.features.backbone

    @property
    def attention(self) -> str:
        return getattr(self.backbone, "attention", "")

    @property
    def tokens(self) -> str:
        return getattr(self.backbone, "tokens", "")

    @property
    def head_text(self) -> str:
        """The spec of the head: its name and the options that differ from their defaults."""
        return str(Spec(self.name, self.chosen))

    def plan(self) -> tuple[Blueprint, dict[str, Any]]:
        """What is needed to rebuild the model: the backbone and the task."""
        about = {"name": self.task, "head": self.head_text, "num_classes": self.num_classes}
        return blueprint(self.backbone), about

    def no_weight_decay(self) -> set[str]:
        return {f"features.backbone.{name}" for name in self.backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups of the backbone for layer-wise learning rate decay; the head comes after them."""
        inner = self.backbone.group_matcher(coarse=coarse)
        return {name: _inside(pattern) for name, pattern in inner.items()}


def _inside(pattern: Any) -> Any:
    """A backbone's pattern of parameter names (or a list of patterns with values) with the prefix of the backbone."""
    if isinstance(pattern, str):
        return rf"^features\.backbone\.(?:{pattern.removeprefix('^').replace('|^', '|')})"
    return [(_inside(text), place) for text, place in pattern]


def head_class(text: str) -> tuple[type[Dense], Options]:
    """The class and the options of a head, from its spec."""
    name, _, options = text.partition(":")
    if name not in HEADS:
        raise unknown("head", name, HEADS)
    _, home, class_name = HEADS[name]
    try:
        found = getattr(importlib.import_module(f".{home}", __package__), class_name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("attendless"):
            raise
        raise UserError(f"head {name!r} needs {error.name}: pip install 'attendless[dense]'") from None
    return found, parse_options(options, found.options, f"head {name}")


def head_for(task: str, head: str | None) -> str:
    """The head for a task; raises if it is for another task."""
    if task not in TASKS:
        raise unknown("task", task, ("classification", *TASKS))
    chosen = head or DEFAULT_HEADS[task]
    name = chosen.partition(":")[0]
    fitting = [other for other, (whose, *_) in HEADS.items() if whose == task]
    if name not in HEADS:
        raise unknown("head", name, fitting)
    if name not in fitting:
        raise UserError(f"head {name!r} is for {HEADS[name][0]}, not for {task}: expected {' or '.join(fitting)}")
    return chosen


def build(backbone: nn.Module, head: str, num_classes: int) -> Dense:
    """Put a head for detection or segmentation on a backbone.

    Args:
        backbone: A backbone of attendless or timm. It is used in place and loses its classifier.
        head: Spec of the head: `retinanet`, `semantic_fpn:channels=64` or `upernet`.
        num_classes: Number of classes.

    Raises:
        UserError: there is no such head, or a library it needs is not installed.
    """
    made, options = head_class(head)
    if hasattr(backbone, "reset_classifier"):
        reset_classifier(backbone, 0)
    constructor: Callable[..., Dense] = made
    model = constructor(Features(backbone), num_classes, options)
    model.pretrained_cfg = model.default_cfg = {**image_config(backbone), "label_names": None, "classifier": None}
    return model


def restore(backbone: nn.Module, about: Mapping[str, Any]) -> Dense:
    """Build the model that a file describes; its weights are not loaded yet."""
    head_for(str(about["name"]), str(about["head"]))
    return build(backbone, str(about["head"]), int(about["num_classes"]))
