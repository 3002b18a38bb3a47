"""Objectives: weighted loss terms from one forward pass.

An objective is a module that contains the model, so that wrapping it for several processes wraps the whole computation:
`objective(images, targets) -> {term: weighted loss}`. The loss is their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Context
from .labelling import patch_answers


class Supervised(nn.Module):
    """Cross-entropy with soft targets, and the losses that attentions add to the context.

    A patch head is trained with the target of the image for every patch, since patches have no labels of their own.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, float]) -> None:
        super().__init__()
        self.model, self.weights = model, dict(weights)

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found = outputs(self.model, images)
        terms = {"label": soft_cross_entropy(found.logits, targets)}
        if answers_patches(self.model) and found.context is not None:
            answers = patch_answers(self.model, found.features, found.context.grid)
            terms["patches"] = soft_cross_entropy(answers, targets[:, None])
        return weighted({**terms, **found.extra}, self.weights)


def answers_patches(model: nn.Module) -> bool:
    """Whether a model has a patch head."""
    return hasattr(model, "patch_logits")


class Output(NamedTuple):
    """Outputs of a model: logits [B, classes], the features they come from, the context, and losses of attentions."""

    logits: Tensor
    features: Tensor
    context: Context | None
    extra: dict[str, Tensor]


def outputs(model: Any, images: Tensor) -> Output:
    """Run a model of timm or attendless; only those of attendless have a context."""
    if hasattr(model, "forward_context"):
        return collect(model, *model.forward_context(images))
    features = model.forward_features(images)
    return Output(model.forward_head(features), features, None, {})


def collect(model: Any, features: Tensor, context: Context) -> Output:
    """Compute the logits from the features, and sum the extra losses by name."""
    return Output(model.answer(features, context.grid), features, context, context.extra())


def weighted(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Multiply each term by its weight; terms without a weight come from attentions and use `extra`."""
    factors = {name: weights.get(name, weights.get("extra", 1.0)) for name in terms}
    return {name: value * factors[name] for name, value in terms.items() if factors[name]}


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ targets · log softmax(logits) over the last dimension, averaged over all others."""
    return -(targets * F.log_softmax(logits.float(), dim=-1)).sum(-1).mean()


def trace_bad(objective: nn.Module, images: Tensor, targets: Any) -> str:
    """Name the first tensor with NaN or infinity: the input, a parameter, a module's output or a gradient."""
    if not images.isfinite().all():
        return "the input images"
    for name, parameter in objective.named_parameters():
        if not parameter.isfinite().all():
            return f"parameter {_short(name)}"
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            values = output if isinstance(output, tuple | list) else (output,)
            if not found and any(isinstance(v, Tensor) and not v.isfinite().all() for v in values):
                found.append(f"output of {_short(name)}")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in objective.named_modules() if name]
    try:
        with torch.no_grad():
            terms = objective(images, targets)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    bad = [name for name, value in terms.items() if not value.isfinite()]
    if bad:
        return f"loss term {bad[0]!r}"
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"gradient of {_short(name)}"
    return "not found again when the step was repeated"


def _short(name: str) -> str:
    for prefix in ("module.", "_orig_mod.", "model."):
        name = name.removeprefix(prefix)
    return name
