"""Token labelling: every patch has a target of its own, and patches of two images can be mixed.

    patches    −Σ label · log softmax(logits of a patch), averaged over patches. The label is the teacher's prediction
               for the same patch; for a merged token, the mean over its patches
    MixToken   inside a random box, the tokens of an image are replaced by those of another (i by B − 1 − i) before the
               first block; patch labels move with the tokens, image labels are mixed by the area of the box

The loss, the patch head and MixToken with CutMix's box come from LV-ViT's paper. The paper computes the labels in
advance with a large convolutional teacher. Here the teacher computes them during training from the same image, with its
patch head or, if it has none, with its classifier applied to every patch token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..attention import Grid


def patch_answers(model: Any, features: Tensor, grid: Grid) -> Tensor:
    """Logits of each patch [B, n, classes] from the tokens after the last norm."""
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
        """Fraction of an image that is not replaced."""
        return 1 - float(self.inside.float().mean())

    def patches(self, x: Tensor) -> Tensor:
        """Values x [B, height · width, …] per cell, replaced inside the box by those of the other image."""
        inside = self.inside.reshape(1, -1, *[1] * (x.ndim - 2))
        return torch.where(inside, x.flip(0), x)

    def tokens(self, x: Tensor, prefix: int) -> Tensor:
        """Tokens x [B, N, C] with mixed patches and an unchanged prefix."""
        return torch.cat([x[:, :prefix], self.patches(x[:, prefix:])], dim=1)

    def images(self, x: Tensor) -> Tensor:
        """Values x [B, …] per image, mixed by area."""
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
