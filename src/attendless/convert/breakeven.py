"""Whether attending less can pay in one layer at one size.

The rule: an attention is worth converting to if it should take less time on this machine than full attention, by costs
measured here once (`sparse.calibration`). Where there is no such estimate (another attention to beat, a mechanism that
is plain PyTorch, a GPU, or the policy `off`) it must compute fewer multiply-accumulates than the one it replaces, its
choice of keys and its own extra layers included. Either way `bench` measures what the clock says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..attention import Attention, Grid, Macs
from ..sparse import calibration, dispatch
from ..sparse.dispatch import milliseconds
from ..sparse.full import macs as full_macs

#: No size beyond this one is looked at, in pixels.
LARGEST = 2048


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether to keep the conversion of a layer, and why."""

    keep: bool
    reason: str


def breakeven(attention: Attention, grid: Grid, current: Macs | None = None) -> Decision:
    """Compare `attention` on `grid` with what it replaces: full attention, unless `current` says otherwise."""
    if attention.name == "full" and current is None:
        return Decision(True, "full attention was asked for")
    estimate = estimated(attention, grid) if current is None else None
    if estimate is not None:
        ours, full = (milliseconds(seconds) for seconds in estimate)
        where = "this machine, while it was busy" if calibration.disturbed() else "this machine"
        return Decision(estimate[0] < estimate[1], f"{ours} estimated on {where}, full attention {full}")
    then, now = attention.macs(grid), current or dense_macs(attention, grid)
    what = "full attention" if current is None else "the model's own"
    return Decision(then.total < now.total, f"{then.total / now.total:.2f}× the MACs of {what}")


def estimated(attention: Attention, grid: Grid, batch: int = 1) -> tuple[float, float] | None:
    """Estimated seconds of `attend` and of full attention on this machine; None if there is no estimate."""
    case = attention.case(grid.condensed(), batch)
    return None if case is None else dispatch.against_full(case)


def pays_from(
    attention: Attention, grid: Grid, size: tuple[int, int], current: Callable[[Grid], Macs | None]
) -> int | None:
    """The smallest square size up to `LARGEST`, in whole patches, from which `attention` pays; None if there is none.

    `grid` is the layer's at the model's `size`; it grows as the image does. `current` counts what is to be beaten
    (None: full attention).
    """
    patch = -(-size[0] // grid.height)
    for cells in range(1, LARGEST // patch + 1):
        square = Grid(cells, cells, grid.prefix, depth=grid.depth)
        if cells * patch <= min(size) or attention.refuses(square) is not None:
            continue
        if breakeven(attention, square, current(square)).keep:
            return cells * patch
    return None


def dense_macs(attention: Attention, grid: Grid) -> Macs:
    """What full attention of the same width and heads costs on `grid`."""
    width = attention.attn_dim
    return Macs(core=full_macs(grid.tokens, width), projections=4 * grid.tokens * attention.dim * width)
