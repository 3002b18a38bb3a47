"""Decide whether an attention pays in one layer at one size.

An attention pays if its estimated time on this machine is less than that of full attention, by costs that are measured
here once (`sparse.calibration`). There is no such estimate if the model's own attention is not full attention, if the
attention has no native kernel, on a GPU, and with the policy `off`. Then the attention must compute fewer
multiply-accumulates than the one it replaces, including its selection of keys and its own layers. `bench` measures the
actual time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..attention import Attention, Grid, Macs
from ..sparse import calibration, dispatch
from ..sparse.dispatch import milliseconds
from ..sparse.full import macs as full_macs

#: Largest size that `pays_from` tries, in pixels.
LARGEST = 2048


class Decision(NamedTuple):
    """Whether to keep the conversion of a layer, and why."""

    keep: bool
    reason: str


def breakeven(attention: Attention, grid: Grid, current: Macs | None = None) -> Decision:
    """Compare `attention` on `grid` with the attention it replaces: one that costs `current`; None: full attention."""
    if attention.name == "full" and current is None:
        return Decision(True, "full attention was asked for")
    estimate = estimated(attention, grid) if current is None else None
    if estimate is not None:
        ours, full = (milliseconds(seconds) for seconds in estimate)
        where = "this machine, while it was busy" if calibration.disturbed() else "this machine"
        return Decision(estimate[0] < estimate[1], f"{ours} estimated on {where}, full attention {full}")
    then, now = attention.macs(grid), current or full_attention_macs(attention, grid)
    what = "full attention" if current is None else "the model's own"
    return Decision(then.total < now.total, f"{then.total / now.total:.2f}× the MACs of {what}")


def estimated(attention: Attention, grid: Grid, batch: int = 1) -> tuple[float, float] | None:
    """Estimated seconds of `attend` and of full attention on this machine; None if there is no estimate."""
    case = attention.case(grid.condensed(), batch)
    return None if case is None else dispatch.against_full(case)


def pays_from(
    attention: Attention, grid: Grid, size: tuple[int, int], current: Callable[[Grid], Macs | None]
) -> int | None:
    """The smallest square size up to `LARGEST`, in whole patches, at which `attention` pays; None if there is none.

    `grid` is that of the layer at the model's `size`, and grows with the image. `current` returns the cost on a grid of
    the attention that is replaced (None: full attention).
    """
    patch = -(-size[0] // grid.height)
    for cells in range(1, LARGEST // patch + 1):
        square = Grid(cells, cells, grid.prefix, depth=grid.depth)
        if cells * patch <= min(size) or attention.refuses(square) is not None:
            continue
        if breakeven(attention, square, current(square)).keep:
            return cells * patch
    return None


def full_attention_macs(attention: Attention, grid: Grid) -> Macs:
    """The cost on `grid` of full attention of the same width."""
    width = attention.attn_dim
    return Macs(core=full_macs(grid.tokens, width), projections=4 * grid.tokens * attention.dim * width)
