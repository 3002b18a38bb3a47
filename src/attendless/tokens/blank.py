"""Redundant patches of documents, screenshots and videos merge before the first layer. Requires no training.

    difference of a patch = the smallest ‖x − y‖² to its left neighbour, the one above, and the one in the frame before
    the (1 − keep) · n patches with the smallest difference join that neighbour, and with it the patch it joins, but
    never across the border of a window of the grid
    a group becomes one token, the mean of its patches, and weighs as much as all of them in attention

x and y are the tokens that enter the first layer, positions included. The rest of the model computes with fewer tokens.

Merging equal tokens is exact: they stay equal in every layer, and log(size) gives their key the weight of all of them.
Patches with the same pixels are equal tokens only in a model without position embeddings. There, `window=0` merges them
across any distance. With position embeddings a group gets the mean of its positions, which is an approximation; small
windows keep it close. `exact` raises an error for images in which unequal tokens would merge. It compares values, so
that a model with it cannot be compiled or exported. Rotary positions turn the keys of equal tokens by different angles,
which `exact` does not see: merging is not exact in a model with rotary positions.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import options
from ..attention import Context, Grid
from ..errors import UserError
from .interface import Reducer
from .joining import joined, numbers
from .registry import register_reducer

#: The largest ‖x − y‖ of equal tokens, relative to the norm of a token: rounding errors of the embedding.
EQUAL = 1e-5


@dataclasses.dataclass(frozen=True)
class BlankOptions(options.Options):
    keep: float = options.option(0.5, "share of the patches left", low=0, high=1)
    window: int = options.option(4, "merge only within windows of this many patches a side; 0: anywhere", low=0)
    exact: bool = options.option(False, "raise an error rather than merge tokens that are not equal")


@register_reducer
class Blank(Reducer):
    name = "blank"
    Options = BlankOptions
    first = True
    examples = ("blank", "blank:keep=0.3,window=0", "blank:keep=0,window=2")
    not_searched = "blank works in the first layer alone, and its share depends on the kind of images"

    @classmethod
    def layers(cls, given: BlankOptions, depth: int) -> list[int]:
        return [0] if given.keep < 1 else []

    def remaining(self, grid: Grid) -> int:
        sides = [-(-side // (self.options.window or side)) for side in (grid.depth, grid.height, grid.width)]
        return max(math.prod(sides), round(self.options.keep * grid.patches))  # a patch of each window stays

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        r = grid.patches - self.remaining(grid)
        if not r:
            return x, context
        with torch.no_grad():
            patches = x[:, grid.prefix :].float()
            difference, neighbour = nearest(patches, grid, self.options.window)
            order = difference.argsort(dim=1, stable=True)[:, :r]
            if self.options.exact:
                refuse_unequal(patches, difference.gather(1, order), grid)
            into = numbers(x, grid.patches).scatter(1, order, neighbour.gather(1, order))
            for _ in range(grid.patches.bit_length()):  # each step doubles the length of the chains that are followed
                into = into.gather(1, into)
        found = joined(x, grid, into, r)
        left = dataclasses.replace(grid, cells=found.cells, sizes=found.sizes, owners=found.owners, weighting="size")
        return found.x, context.replace(grid=left)


def nearest(x: Tensor, grid: Grid, window: int) -> tuple[Tensor, Tensor]:
    """For each patch of x [B, n, C] on a whole grid: the smallest squared distance to an earlier neighbour in its
    window (infinite for the first patch of a window), and the number of that neighbour, both [B, n]."""
    steps = (1, grid.width, grid.height * grid.width)  # back to the patch on the left, above, in the frame before
    number = torch.arange(grid.patches, device=x.device)
    places = (number % grid.width, number // grid.width % grid.height, number // steps[2])
    inside = [(place % window if window else place) > 0 for place in places]
    found = []
    for step, there in zip(steps, inside, strict=True):
        if step < grid.patches:
            distance = (x[:, step:] - x[:, :-step]).square().sum(2)
            found.append(F.pad(distance, (step, 0)).masked_fill(~there, torch.inf))
    difference, which = torch.stack(found, dim=2).min(dim=2)
    return difference, (number - torch.tensor(steps, device=x.device)[which]).clamp(min=0)


def refuse_unequal(x: Tensor, difference: Tensor, grid: Grid) -> None:
    """Raise if a patch of x [B, n, C] would join one that differs, given the r differences [B, r]."""
    if torch.compiler.is_compiling():
        raise UserError(
            "blank:exact=true compares the tokens of each image, which a compiled model cannot: leave it out"
        )
    equal = (difference <= EQUAL**2 * x.square().sum(2).mean()).sum(1)
    if (fewest := int(equal.min())) < difference.shape[1]:
        text = f"blank:exact=true was to merge {difference.shape[1]} of {grid.patches} patches, but an image has only"
        raise UserError(
            f"{text} {fewest} whose token equals that of a neighbour. Use a larger keep, or leave exact out. Position "
            "embeddings make the tokens of equal patches differ"
        )
