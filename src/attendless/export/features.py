"""The exported function of a model: images to a tuple of outputs, logits or feature maps [B, C, h, w]."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from ..sizes import model_name

#: Models whose maps have one size: the last map is exported. Of other models, every level is exported.
_MOST = 8


class Logits(nn.Module):
    """A classifier's one output, as a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        found = self.model(images)
        return tuple(found) if isinstance(found, tuple | list) else (found,)


class Maps(nn.Module):
    """The last map of a backbone, normalised as for its head; the last map of every stage of a hierarchical model."""

    def __init__(self, model: nn.Module, levels: list[int]) -> None:
        super().__init__()
        self.model, self.levels = model, levels

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        model: Any = self.model
        return tuple(model.forward_intermediates(images, indices=self.levels, norm=True, intermediates_only=True))


def outputs_of(model: nn.Module, *, features: bool = False) -> nn.Module:
    """The module that is run or exported in a model's place."""
    if not features:
        return Logits(model).eval()
    if not hasattr(model, "forward_intermediates"):
        raise UserError(f"{model_name(model)} has no feature maps: it does not define forward_intermediates")
    return Maps(model, _levels(model)).eval()


def _levels(model: nn.Module) -> list[int]:
    reductions = [entry.get("reduction") for entry in getattr(model, "feature_info", [])]
    pyramid = 1 < len(reductions) <= _MOST and len(set(reductions)) == len(reductions)
    return list(range(len(reductions))) if pyramid else [-1]
