"""Token labelling: every patch has an answer of its own to learn, and patches of two images may be mixed.

    patches    −Σ label · log softmax(answer of a patch), averaged over patches; its label is what the teacher answers
               for the same patch, or, for one that stands for several, the mean of theirs
    MixToken   the tokens of an image inside a random box are those of another image (i and B − 1 − i change places),
               before the first block; labels of patches move with them, labels of images mix by the box's area

From LV-ViT's paper are the loss, the head for patches and MixToken with a box as CutMix draws it. There the labels were
made beforehand by a large convolutional teacher; here the teacher makes them as it goes, from the same picture, with
its own head for patches or, where it has none, with its classifier on every patch token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..attention import Grid


def patch_answers(model: Any, features: Tensor, grid: Grid) -> Tensor:
    """What a model says of each patch, given its tokens after the last norm: logits [B, n, classes]."""
    if hasattr(model, "patch_logits"):
        return model.patch_logits(features)
    patches = features[:, grid.prefix :]
    return model.head(model.fc_norm(patches) if hasattr(model, "fc_norm") else patches)


@dataclasses.dataclass(frozen=True)
class Box:
    """The cells of a grid, bool [height · width], whose tokens come from the other image."""

    inside: Tensor

    @property
    def share(self) -> float:
        """The part of an image that is still its own."""
        return 1 - float(self.inside.float().mean())

    def patches(self, x: Tensor) -> Tensor:
        """Values x [B, height · width, …] of every cell: the other image's inside the box."""
        inside = self.inside.reshape(1, -1, *[1] * (x.ndim - 2))
        return torch.where(inside, x.flip(0), x)

    def tokens(self, x: Tensor, prefix: int) -> Tensor:
        """Tokens x [B, N, C]: the prefix stays, the patches mix."""
        return torch.cat([x[:, :prefix], self.patches(x[:, prefix:])], dim=1)

    def images(self, x: Tensor) -> Tensor:
        """Values x [B, …] of images, by area."""
        return self.share * x + (1 - self.share) * x.flip(0)


def draw_box(grid: Grid, alpha: float, device: torch.device | str = "cpu") -> Box:
    """A box as CutMix draws it: 1 − λ of the area, λ from Beta(alpha, alpha), around any cell, cut off at the edges."""
    kept = torch.distributions.Beta(alpha, alpha).sample()
    side = float((1 - kept).sqrt())
    sides = []
    for length in (grid.height, grid.width):
        centre, half = int(torch.randint(length, ())), int(length * side) // 2
        place = torch.arange(length, device=device)
        sides.append((place >= centre - half) & (place < centre + half))
    return Box((sides[0][:, None] & sides[1]).flatten())
