"""What of a model is exported: images in, a tuple of outputs out. Logits, or maps of features [B, C, h, w]."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from ..sizes import model_name

#: Models whose maps have one size: their last one is what others build on. Of the rest every level is given.
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
    """A backbone's last map, normed as its head would have it; of a pyramid the last map of every stage."""

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
        raise UserError(f"{model_name(model)} gives no maps of features: it has no forward_intermediates")
    return Maps(model, _levels(model)).eval()


def _levels(model: nn.Module) -> list[int]:
    reductions = [entry.get("reduction") for entry in getattr(model, "feature_info", [])]
    pyramid = 1 < len(reductions) <= _MOST and len(set(reductions)) == len(reductions)
    return list(range(len(reductions))) if pyramid else [-1]
