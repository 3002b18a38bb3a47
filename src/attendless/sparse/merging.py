"""Merging of similar tokens: the patches are divided into sources and targets, each source is matched with the most
similar target, and r sources are merged into theirs.

    sources a, targets b = the patches 1, 3, 5, … and 0, 2, 4, … (ToMe's partition if there is one prefix token),
                           or, with `sources`, the so many least important patches and the others
    s_i  = max over j of cos(key of a_i, key of b_j) − protect · log(importance of a_i)
    the r sources with the largest s_i are merged into their target: a mean weighted by the tokens that each patch
    represents

With `sources`, the mean is weighted by importance instead, and rescaled to the mean length, equally weighted:

    m = Σ w_i x_i / Σ w_i      x = m · min(2, (Σ w_i |x_i| / Σ w_i) / |m|)      w_i = importance of patch i

A target is more important than the sources that join it, so it changes little. A plain mean of vectors that differ in
direction is shorter than they are, which the following layers would see as another kind of token.

The remaining sources come first in the result, in their order, then the targets. On equal s, the earlier patch is
merged, into the earlier target; of equally important patches the later is a source. With `window`, a target lies in the
same window of the grid; a source without one is merged last.

Shapes: B batch · N tokens, prefix first · n patches · A sources · m = n − r remaining patches · C width · D width of a
key. This file is the PyTorch definition, differentiable in x and sizes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError

#: The least weight and length and the largest weight in a weighted mean; the most that it is lengthened by.
_LEAST, _MOST, _LONGEST = 1e-12, 1e6, 2.0


@dataclasses.dataclass(frozen=True)
class Merging:
    """The plan of a call: a grid of `height` × `width` with `prefix` tokens in front, the number of `patches` present,
    the number `r` of patches to merge, and the number of `sources` (0: every second patch)."""

    height: int
    width: int
    prefix: int
    patches: int
    r: int
    window: int = 0
    sources: int = 0
    protect: float = 0.0

    def __post_init__(self) -> None:
        if min(self.numbers) < 0:
            raise UserError(f"{self}: no number may be below 0")
        if self.sources and self.sources >= self.patches:
            raise UserError(f"{self.sources} of {self.patches} patches cannot be sources: one at least is a target")
        if self.r > self.seeking:
            raise UserError(f"{self.r} of {self.patches} patches cannot merge: {self.seeking} at most have a partner")

    @property
    def seeking(self) -> int:
        """The number of sources."""
        return self.sources or self.patches // 2

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
        return [self.height, self.width, self.prefix, self.patches, self.r, self.window, self.sources]

    @property
    def partners(self) -> int:
        """The average number of targets that a source is compared with."""
        others = self.patches - self.seeking
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
        importance: [B, N]; divides patches into sources and targets and weights their mean; with `plan.protect` it
            spares important sources.
        sizes, cells, owners: The result of earlier merging: [B, n], [B, n], [B, height · width]. None: each patch
            represents itself, at its own position.
    """
    P, n = plan.prefix, plan.patches
    keys = keys if keys.ndim == 3 else keys.mean(1)
    if cells is None:
        cells = torch.arange(n, device=x.device).expand(x.shape[0], n)
    with torch.no_grad():
        importance = None if importance is None else importance[:, P:]
        sources, targets = divide(plan, importance, cells)
        index = match(keys[:, P:], plan, importance, cells, sources, targets)
    weights = importance if plan.sources else None
    merged, total = join(x[:, P:], index, plan.left, sizes, weights)
    # Targets are scattered last: a merged patch keeps the position of its target.
    places = cells.new_empty(x.shape[0], plan.left)
    for part in (sources, targets):
        places = places.scatter(1, index.gather(1, part), cells.gather(1, part))
    moved = reowned(index, cells, owners, plan.cells)
    return Merged(torch.cat([x[:, :P], merged], dim=1), total, places, moved)


def divide(plan: Merging, importance: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The sources [B, A] and the targets [B, n − A], each in ascending order, for `like` [B, n]."""
    if not plan.sources:
        every = torch.arange(plan.patches, device=like.device).expand_as(like)
        return every[:, 1::2], every[:, ::2]
    if importance is None:
        raise UserError(f"{plan.sources} sources are chosen by importance, but none is given")
    order = importance.argsort(dim=1, descending=True, stable=True)
    targets, sources = order.split([plan.patches - plan.sources, plan.sources], dim=1)
    return sources.sort(dim=1).values, targets.sort(dim=1).values


def match(
    keys: Tensor, plan: Merging, importance: Tensor | None, cells: Tensor, sources: Tensor, targets: Tensor
) -> Tensor:
    """The index of each patch in the result, for keys [B, n, D]: [B, n]."""
    likeness, partner = similarities(keys, plan, importance, cells, sources, targets)
    order = likeness.argsort(dim=-1, descending=True, stable=True)
    goes = torch.zeros_like(partner, dtype=torch.bool).scatter(1, order[:, : plan.r], True)
    stays = plan.seeking - plan.r
    index = torch.where(goes, stays + partner, (~goes).cumsum(1) - 1)
    numbers = torch.arange(stays, plan.left, device=keys.device).expand_as(targets)
    return torch.empty_like(cells).scatter(1, sources, index).scatter(1, targets, numbers)


def similarities(
    keys: Tensor, plan: Merging, importance: Tensor | None, cells: Tensor, sources: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """For every source: s of its best pair, and the number of its target, both [B, A]."""
    unit = F.normalize(keys.float(), dim=-1)
    cosine = _rows(unit, sources) @ _rows(unit, targets).transpose(1, 2)
    if plan.window:
        window = windows(plan, cells)
        apart = window.gather(1, sources)[:, :, None] != window.gather(1, targets)[:, None]
        cosine = cosine.masked_fill(apart, -torch.inf)
    likeness, partner = cosine.max(dim=-1)
    if plan.protect and importance is not None:
        likeness = likeness - plan.protect * importance.gather(1, sources).float().log()
    return likeness, partner


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def windows(plan: Merging, cells: Tensor) -> Tensor:
    """The window that contains each patch."""
    row, column = cells // plan.width // plan.window, cells % plan.width // plan.window
    return row * -(-plan.width // plan.window) + column


def join(
    x: Tensor, index: Tensor, left: int, sizes: Tensor | None, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Patches x [B, n, C] with the result index `index` [B, n] → their means [B, left, C] and the sums of their sizes
    [B, left]. The means are weighted by size, or by `importance` [B, n], and then keep the mean length."""
    size = x.new_ones(x.shape[:2]) if sizes is None else sizes.to(x.dtype)

    def summed(values: Tensor) -> Tensor:
        """The sums [B, left, ·] of values [B, n, ·]."""
        zeros = values.new_zeros(x.shape[0], left, values.shape[2])
        return zeros.scatter_add(1, index[..., None].expand_as(values), values)

    total = summed(size[..., None])
    if importance is None:
        return summed(x * size[..., None]) / total, total[..., 0]
    weight = importance.float()
    weight = weight.where(weight > _LEAST, _LEAST).clamp(max=_MOST)[..., None]  # neither NaN nor infinity
    share = weight / summed(weight).gather(1, index[..., None])
    mean, length = summed(x * share.to(x.dtype)), summed(x.float().norm(dim=-1, keepdim=True) * share)
    longer = (length / mean.float().norm(dim=-1, keepdim=True).clamp(min=_LEAST)).clamp(max=_LONGEST)
    return mean * longer.to(x.dtype), total[..., 0]


def reowned(index: Tensor, cells: Tensor, owners: Tensor | None, count: int) -> Tensor:
    """The patch that represents each of the `count` grid positions, once patch i is index[:, i] (−1: dropped)."""
    if owners is None:
        owners = cells.new_full((cells.shape[0], count), -1)
        owners = owners.scatter(1, cells, torch.arange(cells.shape[1], device=cells.device).expand_as(cells))
    return torch.where(owners < 0, -1, index.gather(1, owners.clamp(min=0)))


def macs(plan: Merging, width: int) -> int:
    """Multiply-accumulates of the comparison, for keys of this width."""
    return plan.seeking * plan.partners * width
