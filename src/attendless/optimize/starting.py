"""What `optimize` makes of its arguments before it searches: the model in fp32, its backbone, targets and scoring."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..integrations.rebuild.copying import backbone_copy
from ..measure.scores import Metric
from ..sizes import image_config, input_size, set_image_config, size_text
from ..storage import digest
from .candidates import share_weights, shared_copy
from .goals import Goal
from .scoring import cosine

#: The most bytes of outputs of the original model that are held at once.
_MEMORY = 6e8


def plain(model: nn.Module, shape: Sequence[int]) -> nn.Module:
    """The model in evaluation mode and fp32 on the CPU, sharing its weights where they are so already.

    `shape`: channels, height and width of the images. A model that states no size, or takes any, gets theirs.
    """
    first = next(model.parameters())
    is_plain = first.dtype == torch.float32 and first.device.type == "cpu"
    made = (shared_copy(model) if is_plain else copy.deepcopy(model).float().cpu()).eval()
    size = (shape[1], shape[2])
    if input_size(made) != size:
        set_image_config(made, image_config(made) | {"input_size": tuple(shape)})
    if input_size(made) != size:
        given, wanted = size_text(size), size_text(input_size(made))
        raise UserError(f"images of {given} px were given, the model takes {wanted} px: resize the images or the model")
    return made


def backbone_of(original: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model whose attentions can be exchanged; the original itself, with the reason, if there is none."""
    try:
        return share_weights(backbone_copy(original, in_place=True).eval(), original), []
    except UserError as error:
        reason, _, _ = str(error).partition(" There are:")  # a list of all supported models
        return original, [f"attention and tokens were not searched: {reason}"]


def rebuilds(original: nn.Module) -> bool:
    """Whether a checkpoint rebuilds the model. Others are saved as traced graphs, which compute in fp32 alone."""
    try:
        backbone_copy(original)
    except UserError:
        return False
    return True


def targets_of(labels: Tensor | Sequence[int] | None, count: int) -> Tensor | None:
    """The labels as a tensor."""
    if labels is None:
        return None
    found = torch.as_tensor(labels).cpu()
    if len(found) != count:
        raise UserError(f"{len(found)} labels for {count} images: expected one for each")
    return found


def metric_for(metric: Metric | None, original: nn.Module, shape: Sequence[int]) -> Metric | None:
    """The metric of outputs of `shape` for an image: the one that was given; cosine similarity if there are no classes;
    None for classifiers."""
    if metric is not None:
        return metric
    if list(shape) == [1]:
        raise UserError("the model returns one number for an image, not classes or features: give a metric")
    return None if len(shape) == 1 and classifies(original) else cosine


def metric_name(metric: Metric | None, labels: Tensor | None) -> str:
    """What scores depend on besides outputs, for the log: the metric, and the labels if it reads them."""
    if metric is None:
        return ""
    name = f"{getattr(metric, '__module__', '')}:{getattr(metric, '__qualname__', type(metric).__name__)}"
    return name if labels is None else f"{name} {digest('labels', {'labels': labels})}"


def scored_by(metric: Metric | None, labels: Tensor | None) -> str:
    """What a drop is a drop of, for the report."""
    if metric is not None:
        return f"drop of 100 · {'cosine similarity' if metric is cosine else getattr(metric, '__name__', 'metric')}"
    return f"{'expected ' if labels is None else ''}accuracy drop in percentage points"


def cost_of(answers: Callable[[Tensor], Tensor], images: Tensor) -> tuple[float, list[int]]:
    """Seconds of the original model for an image, and the shape of its output."""
    try:
        outputs = list(answers(images[:1])[0].shape)
    except (RuntimeError, AssertionError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"the model cannot be run on images {list(images.shape[1:])}: {reason[0][:200]}. It must return one tensor "
            "with an entry per image: wrap a model that returns something else"
        ) from error
    few = images[: min(16, len(images))]
    began, done = time.perf_counter(), 0
    while done < len(few) and time.perf_counter() - began < 1.0:
        answers(few[done : done + 4])
        done += len(few[done : done + 4])
    return (time.perf_counter() - began) / done, outputs


def most_images(shape: Sequence[int]) -> int:
    """The number of images whose outputs fit into memory."""
    return max(4, int(_MEMORY / (4 * math.prod(shape))))


def check_goal(goal: Goal, metric: Metric | None, model: nn.Module) -> None:
    """Raise if the goal counts predictions, and there are none."""
    if goal.min_agreement is not None and (metric is not None or not classifies(model)):
        why = "a metric replaces them" if metric is not None else "the model has no classifier"
        raise UserError(f"min_agreement counts predicted classes, and {why}: give max_drop, a drop of 100 · the score")


def classifies(original: Any) -> bool:
    return bool(getattr(original, "num_classes", 2) != 0)
