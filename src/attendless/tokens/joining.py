"""Each patch stays or joins another: the part that reducers share which choose a partner for every merged patch.

Shapes: B batch · N tokens, prefix first · n patches · C width · D width of a key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import Context, Grid, Macs
from ..sparse.merging import Merged, join, reowned
from .schedule import ScheduledReducer


class JoiningReducer(ScheduledReducer):
    """A scheduled reducer that compares all patches by the cosine of their keys. A mechanism defines `targets`."""

    entries = frozenset({"keys"})

    def targets(self, cosine: Tensor, r: int) -> Tensor:
        """The patch that each patch joins [B, n], for cosines [B, n, n]: r patches join one that stays, and a patch
        that stays joins itself."""
        raise NotImplementedError(f"{type(self).__name__} does not define targets")

    def macs(self, grid: Grid) -> Macs:
        removes = not self.returns and self.removing(grid.patches) > 0
        return Macs(other=grid.patches**2 * self.head_dim) if removes else Macs()

    def merge(self, x: Tensor, context: Context) -> Merged:
        grid = context.grid
        r = self.removing(grid.patches)
        if not r:
            return joined(x, grid, numbers(x, grid.patches), r)
        with torch.no_grad():
            unit = unit_keys(context)
            into = self.targets(unit @ unit.transpose(1, 2), r)
        return joined(x, grid, into, r)


def unit_keys(context: Context) -> Tensor:
    """The patches' keys, averaged over heads and of length 1, [B, n, D]."""
    assert context.keys is not None
    return F.normalize(context.keys[:, :, context.grid.prefix :].float().mean(1), dim=-1)


def numbers(x: Tensor, count: int) -> Tensor:
    """0, 1, 2, … for each image of x, [B, count]."""
    return torch.arange(count, device=x.device).expand(x.shape[0], count)


def joined(x: Tensor, grid: Grid, into: Tensor, r: int) -> Merged:
    """Merge the patches of x [B, N, C] that join the same patch (`into` [B, n]) into their size-weighted mean. The
    n − r patches that stay keep their order and their cells."""
    cells, left = grid.places(x), grid.patches - r
    stays = into == numbers(x, grid.patches)
    number = stays.cumsum(1) - 1
    index = number.gather(1, into)
    merged, sizes = join(x[:, grid.prefix :], index, left, grid.sizes)
    # Cells of patches that leave are written to one more place, which is cut off.
    places = cells.new_zeros(x.shape[0], left + 1).scatter(1, number.where(stays, left), cells)[:, :left]
    owners = reowned(index, cells, grid.owners, grid.area)
    return Merged(torch.cat([x[:, : grid.prefix], merged], dim=1), sizes, places, owners)
