"""Mechanisms that learn which keys matter: the weights of the predictor, loading them, and the loss that trains them.

Shapes: B batch · H heads · N tokens · C model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from ..errors import UserError
from .interface import Attention
from .values import Context, Grid


class HasPredictor(Attention):
    """Mixin of a mechanism with a predictor: learned weights that select keys, apart from full attention's weights."""

    #: Methods that select keys; the layer view of `attendless bench` times them separately.
    selection: ClassVar[tuple[str, ...]] = ()

    def predictor(self) -> dict[str, nn.Parameter]:
        """The predictor's weights by name."""
        raise NotImplementedError(f"{type(self).__name__} does not define predictor")

    def take_predictor(self, weights: Mapping[str, Tensor], grid: Grid) -> None:
        """Load predictor weights that were trained on `grid`."""
        raise NotImplementedError(f"{type(self).__name__} does not define take_predictor")

    def map_loss(self, x: Tensor, target: Tensor, context: Context) -> Tensor:
        """The difference between the predicted map for tokens x [B, N, C] and `target` [B, H, N, N]."""
        raise NotImplementedError(f"{type(self).__name__} does not define map_loss")


def map_loss(attention: Attention, x: Tensor, target: Tensor, context: Context) -> Tensor:
    """The difference between a layer's map for tokens x [B, N, C] and `target` [B, H, N, N].

    For a mechanism with a predictor this is the predictor's own loss, otherwise the squared difference summed over the
    keys and averaged over images, heads and queries.
    """
    if isinstance(attention, HasPredictor):
        return attention.map_loss(x, target, context)
    found = attention.map(x, context)
    if found.shape != target.shape:
        raise UserError(f"the maps loss compares like with like: {tuple(found.shape)} and {tuple(target.shape)}")
    return (found - target).square().sum(-1).mean()
