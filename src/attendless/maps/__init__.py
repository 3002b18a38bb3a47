"""Attention maps of a model's layers, computed from the input of each layer.

    maps(model, images, layers=5)[0].weights[0, :, 0]     attention of the class token of the first image, per head
    maps(model, images, query=(112, 80))[-1].on_grid()    attention of the patch that contains a pixel, on the grid

`Attention.map` returns the map that an attention computes, with any kernel, for the selected queries only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attention import Grid
from ..errors import UserError
from .entry import (
    Entry,
    entries,
    entry,
    layers,
    numbers,
    seen_by_us,
)
from .rollout import rollout

__all__ = [
    "Entry",
    "Map",
    "entries",
    "entry",
    "layers",
    "maps",
    "numbers",
    "on_grid",
    "patches_under",
    "rollout",
    "seen_by_us",
]

#: Token indices, prefix first; or a pixel (x, y) of the image, for the patch that contains it.
Query = int | slice | tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Map:
    """The attention map of one layer.

    layer: number of the layer.
    weights: the attention that each query pays to each token, [B, H, queries, N].
    grid: the grid of the tokens.
    """

    layer: int
    weights: Tensor
    grid: Grid

    def on_grid(self) -> Tensor:
        """The attention to the patches on the grid of the image: [B, H, queries, height, width]."""
        return on_grid(self.weights, self.grid)


@torch.no_grad()
def maps(
    model: nn.Module,
    images: Tensor,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    query: Query = slice(None),
) -> list[Map]:
    """Compute the attention maps of a model's layers.

    Args:
        model: A model with attendless attentions, or one that `convert` rebuilds.
        images: Preprocessed images [B, 3, h, w].
        layers: One layer or several, counted from 0, or backwards from -1; default: all with an attendless attention.
        heads: One head or several; default: all.
        query: One query or several by number, prefix tokens first, then the patches row by row; or a pixel (x, y) of
            the image, for the patch that it lies in. Default: all.

    Returns:
        The map of each layer, in their order.
    """
    model = seen_by_us(model)
    found = []
    for given in entries(model, images, numbers(model, layers)):
        grid = given.context.grid
        if not isinstance(query, tuple):
            weights = given.attention.map(given.x, given.context, query)
        elif grid.reduced:  # tokens of a patch differ between images
            patches = patches_under(query, grid, images)
            weights = torch.cat([_of_image(given, image, patch) for image, patch in enumerate(patches)])
        else:
            weights = given.attention.map(given.x, given.context, patches_under(query, grid, images)[0])
        found.append(Map(given.layer, weights[:, _heads(heads, weights.shape[1])], grid))
    return found


def on_grid(weights: Tensor, grid: Grid) -> Tensor:
    """Weights of tokens [B, …, N] → weights of patches on the grid [B, …, height, width].

    The weight of a merged token is divided among its patches; dropped patches have weight 0.
    """
    tokens = weights.flatten(1, -2).transpose(1, 2)
    if grid.owners is not None:
        there = (grid.owners >= 0).to(tokens.dtype)
        held = tokens.new_zeros(len(tokens), grid.patches).scatter_add(1, grid.owners.clamp(min=0), there)
        share = torch.nn.functional.pad(1 / held.clamp(min=1), (grid.prefix, 0), value=1.0)
        tokens = tokens * share[..., None]
    places = grid.restore(tokens)[:, grid.prefix :].transpose(1, 2)
    return places.reshape(*weights.shape[:-1], grid.height, grid.width)


def patches_under(pixel: tuple[float, float], grid: Grid, images: Tensor) -> list[int]:
    """The token of the patch that contains a pixel (x, y), for each of the images [B, 3, h, w]."""
    (x, y), (height, width) = pixel, images.shape[-2:]
    if not (0 <= x < width and 0 <= y < height):
        raise UserError(f"pixel {x:g},{y:g} is outside the image: expected x,y below {width},{height}")
    place = int(y * grid.height / height) * grid.width + int(x * grid.width / width)
    if not grid.reduced:
        return [grid.prefix + place] * len(images)
    counted = torch.arange(1.0, 1 + grid.tokens, device=images.device)[None, :, None].expand(len(images), -1, 1)
    found = grid.restore(counted)[:, grid.prefix + place, 0].int()
    if not bool(found.all()):  # 0: dropped
        raise UserError(f"the patch under pixel {x:g},{y:g} was dropped before this layer and has no map")
    return (found - 1).tolist()


def _of_image(given: Entry, image: int, query: int) -> Tensor:
    """The map of one query of one image [1, H, 1, N]."""
    one = slice(image, image + 1)
    context = pytree.tree_map(lambda value: value[one] if isinstance(value, Tensor) else value, given.context)
    return given.attention.map(given.x[one], context, query)


def _heads(wanted: int | Sequence[int] | None, count: int) -> list[int]:
    found = list(range(count)) if wanted is None else [wanted] if isinstance(wanted, int) else list(wanted)
    for head in found:
        if not -count <= head < count:
            raise UserError(f"head {head} does not exist: the layer has heads 0 to {count - 1}")
    return found
