"""Merging of similar tokens: every second patch is matched with the most similar other patch, and the most similar
pairs are merged.

    a, b = the patches 1, 3, 5, … and 0, 2, 4, … (ToMe's partition if there is one prefix token)
    s_i  = max over j of cos(key of a_i, key of b_j) − protect · log(importance of a_i)
    the r patches of a with the largest s_i are merged into their partner in b: a mean weighted by the tokens that
    each patch represents

The remaining patches of a come first in the result, in their order, then b. On equal s, the earlier patch is merged,
into the earlier partner. With `window`, a partner lies in the same window of the grid; a patch without one is merged
last.

Shapes: B batch · N tokens, prefix first · n patches · m = n − r remaining patches · C width · D width of a key.
This file is the PyTorch definition, differentiable in x and sizes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError


@dataclasses.dataclass(frozen=True)
class Merging:
    """The plan of a call: a grid of `height` × `width` with `prefix` tokens in front, the number of `patches` present,
    and the number `r` of patches to merge."""

    height: int
    width: int
    prefix: int
    patches: int
    r: int
    window: int = 0
    protect: float = 0.0

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.prefix, self.patches, self.r, self.window) < 0:
            raise UserError(f"{self}: no number may be below 0")
        if self.r > self.patches // 2:
            most = self.patches // 2
            raise UserError(f"{self.r} of {self.patches} patches cannot merge: {most} at most have a partner")

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    @property
    def left(self) -> int:
        return self.patches - self.r

    @property
    def remaining(self) -> int:
        """Tokens after merging, prefix included."""
        return self.prefix + self.left

    @property
    def cells(self) -> int:
        return self.height * self.width

    @property
    def numbers(self) -> list[int]:
        """All fields but `protect`, as the kernel takes them."""
        return [self.height, self.width, self.prefix, self.patches, self.r, self.window]

    @property
    def partners(self) -> int:
        """The average number of patches that a patch is compared with."""
        others = self.patches - self.patches // 2
        return min(others, -(-others * self.window**2 // max(1, self.cells))) if self.window else others


class Merged(NamedTuple):
    """The remaining tokens `x` [B, N − r, C]; for each patch, the number of tokens it represents (`sizes`) and its grid
    position (`cells`), both [B, m]; for each grid position, the patch that represents it (`owners`, −1: none)
    [B, cells]."""

    x: Tensor
    sizes: Tensor
    cells: Tensor
    owners: Tensor


def merge(
    x: Tensor,
    keys: Tensor,
    plan: Merging,
    *,
    importance: Tensor | None = None,
    sizes: Tensor | None = None,
    cells: Tensor | None = None,
    owners: Tensor | None = None,
) -> Merged:
    """Merge tokens x [B, N, C] by the similarity of their keys.

    Args:
        x: The tokens.
        keys: [B, N, D], or [B, H, N, D], which is averaged over heads.
        plan: The grid and the number of patches to merge.
        importance: [B, N]; with `plan.protect`, important patches are merged later.
        sizes, cells, owners: The result of earlier merging: [B, n], [B, n], [B, height · width]. None: each patch
            represents itself, at its own position.
    """
    P, n = plan.prefix, plan.patches
    keys = keys if keys.ndim == 3 else keys.mean(1)
    if cells is None:
        cells = torch.arange(n, device=x.device).expand(x.shape[0], n)
    index = match(keys[:, P:], plan, None if importance is None else importance[:, P:], cells)
    merged, total = join(x[:, P:], index, plan.left, sizes)
    # b is scattered last: a merged patch keeps the position of its partner in b.
    places = cells.new_empty(x.shape[0], plan.left)
    places = places.scatter(1, index[:, 1::2], cells[:, 1::2]).scatter(1, index[:, ::2], cells[:, ::2])
    moved = reowned(index, cells, owners, plan.cells)
    return Merged(torch.cat([x[:, :P], merged], dim=1), total, places, moved)


@torch.no_grad()
def match(keys: Tensor, plan: Merging, importance: Tensor | None, cells: Tensor) -> Tensor:
    """The index of each patch in the result, for keys [B, n, D]: [B, n]."""
    likeness, partner = similarities(keys, plan, importance, cells)
    order = likeness.argsort(dim=-1, descending=True, stable=True)
    goes = torch.zeros_like(partner, dtype=torch.bool).scatter(1, order[:, : plan.r], True)
    B, half = partner.shape
    stays = half - plan.r
    index = partner.new_empty(B, plan.patches)
    index[:, 1::2] = torch.where(goes, stays + partner, (~goes).cumsum(1) - 1)
    index[:, ::2] = torch.arange(stays, stays + plan.patches - half, device=keys.device)
    return index


def similarities(keys: Tensor, plan: Merging, importance: Tensor | None, cells: Tensor) -> tuple[Tensor, Tensor]:
    """For every patch of a: s of its best pair, and the partner, both [B, n // 2]."""
    unit = F.normalize(keys.float(), dim=-1)
    cosine = unit[:, 1::2] @ unit[:, ::2].transpose(1, 2)
    if plan.window:
        window = windows(plan, cells)
        cosine = cosine.masked_fill(window[:, 1::2, None] != window[:, None, ::2], -torch.inf)
    likeness, partner = cosine.max(dim=-1)
    if plan.protect and importance is not None:
        likeness = likeness - plan.protect * importance[:, 1::2].float().log()
    return likeness, partner


def windows(plan: Merging, cells: Tensor) -> Tensor:
    """The window that contains each patch."""
    row, column = cells // plan.width // plan.window, cells % plan.width // plan.window
    return row * -(-plan.width // plan.window) + column


def join(x: Tensor, index: Tensor, left: int, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Patches x [B, n, C] with the result index `index` [B, n] → their weighted means [B, left, C] and the sums of the
    weights [B, left]."""
    weight = x.new_ones(x.shape[:2]) if sizes is None else sizes.to(x.dtype)
    total = x.new_zeros(x.shape[0], left).scatter_add(1, index, weight)
    wide = index[..., None].expand_as(x)
    summed = x.new_zeros(x.shape[0], left, x.shape[2]).scatter_add(1, wide, x * weight[..., None])
    return summed / total[..., None], total


def reowned(index: Tensor, cells: Tensor, owners: Tensor | None, count: int) -> Tensor:
    """The patch that represents each of the `count` grid positions, once patch i is index[:, i] (−1: dropped)."""
    if owners is None:
        owners = cells.new_full((cells.shape[0], count), -1)
        owners = owners.scatter(1, cells, torch.arange(cells.shape[1], device=cells.device).expand_as(cells))
    return torch.where(owners < 0, -1, index.gather(1, owners.clamp(min=0)))


def macs(plan: Merging, width: int) -> int:
    """Multiply-accumulates of the comparison, for keys of this width."""
    return plan.patches // 2 * plan.partners * width
