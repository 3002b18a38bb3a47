"""Token reduction in models that keep their own layers, such as those with rotary positions (EVA-02, DINOv3).

The class of a block is replaced by a subclass with `Reducing` mixed in. The model passes all tokens to every block and
receives all tokens from it, so its own code runs unchanged:

    tokens of the whole grid → those that earlier reducers left → the block's own forward → its reducer → restored

The reducer works after the block, because the code of a block cannot be entered between attention and MLP. The block's
MLP therefore computes the tokens that leave in the same layer; all later layers do not.

Rotations are taken at the cell of each remaining token. A merged token keeps the cell of the patch that others joined,
so the rotation of a patch that stays never changes. A mean position would be closer for neighbours, but for patches far
apart it is a place where no patch was, and it would move every patch that others join.

The context of the current image travels in the `Watch` that records its grid.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention import Context, Grid, Macs, Spec
from ..errors import UserError
from ..tokens import Reducer, create_reducers
from .grid_tracking import TokenGrid, in_backward
from .slot import Slot

#: Arguments of a block that hold the rotation of each patch: a tensor [.., patches, D], or several.
_ROTATIONS = ("rope", "position_embeddings")


class Reducing(nn.Module):
    """Mixed into the class of a block."""

    reducer: Reducer | None
    around: TokenGrid
    #: The class that `take_out` restores.
    original: ClassVar[type[nn.Module]]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if in_backward():
            raise UserError("token reduction in a model that keeps its own layers: train without checkpointing")
        context = self.around.watch.context or Context(self.around.whole(x.shape[1]))
        x = _left(x, context.grid)
        reducer = self.reducer
        if reducer is not None and reducer.first:
            x, context = reducer(x, context)
        wants = frozenset() if reducer is None or reducer.first else reducer.reads
        self.around.watch.context = context.wanting(wants)
        turned = {name: _at(kwargs[name], context.grid) for name in _ROTATIONS if name in kwargs}
        x = super().forward(x, *args, **kwargs | turned)
        context = self.around.watch.context
        if reducer is not None and not reducer.first:
            x, context = reducer(x, context)
        self.around.watch.context = context.only(()).wanting(frozenset())
        return context.grid.restore(x)


def _left(x: Tensor, grid: Grid) -> Tensor:
    """The remaining tokens of restored tokens x [B, N, C]."""
    if grid.cells is None:
        return x
    cells = grid.cells[..., None].expand(-1, -1, x.shape[2])
    return torch.cat([x[:, : grid.prefix], x[:, grid.prefix :].gather(1, cells)], dim=1)


def _at(rotation: Any, grid: Grid) -> Any:
    """Rotations [.., area, D] of all cells → [B, heads or 1, n, D] of the remaining patches."""
    if grid.cells is None or rotation is None:
        return rotation
    if not isinstance(rotation, Tensor):
        return type(rotation)(_at(part, grid) for part in rotation)
    if rotation.shape[-2] != grid.area or rotation.ndim > 3:
        raise UserError(f"rotary positions of shape {tuple(rotation.shape)} do not fit grid {grid.whole()}")
    heads = rotation if rotation.ndim == 3 else rotation[None]
    index = grid.cells[:, None, :, None].expand(-1, len(heads), -1, heads.shape[-1])
    return heads.expand(grid.cells.shape[0], -1, -1, -1).gather(2, index)


@functools.cache
def _mixed(block: type[nn.Module]) -> type[Reducing]:
    return type(f"Reducing{block.__name__}", (Reducing, block), {"original": block})


def put(blocks: Sequence[Any], spec: Spec | None, around: TokenGrid, width: int, head_dim: int) -> None:
    """Put the reducers of `spec` into all blocks of a model; None removes them."""
    found = {} if spec is None else create_reducers(spec, width, head_dim, len(blocks))
    if spec is not None and getattr(spec.options, "exact", False):
        raise UserError(f"{spec}: merging is not exact in a model that keeps its own layers; leave out exact=true")
    for number, block in enumerate(blocks):
        take_out(block)
        if number >= min(found, default=len(blocks)):
            weight = next(block.parameters())
            kind: Any = type(block)
            block.__class__ = _mixed(kind)
            block.around = around
            block.reducer = found.get(number)
            if block.reducer is not None:
                block.reducer.to(weight.device, weight.dtype).train(block.training)


def take_out(block: Any) -> None:
    if isinstance(block, Reducing):
        block.__class__ = block.original  # type: ignore[assignment]
        del block.reducer
        block.__dict__.pop("around", None)


def grids(block: nn.Module, grid: Grid) -> tuple[Grid, Grid]:
    """The grid on which a block computes if `grid` enters it, and the grid that leaves it."""
    reducer = block.reducer if isinstance(block, Reducing) else None
    if reducer is None:
        return grid, grid
    after = reducer.reduced(grid)
    return (after if reducer.first else grid), after


def macs(block: nn.Module, grid: Grid) -> Macs:
    """Multiply-accumulates of the reducer of a block that `grid` enters."""
    reducer = block.reducer if isinstance(block, Reducing) else None
    return Macs() if reducer is None else reducer.macs(grid)


def check(slots: Sequence[Slot]) -> None:
    """Raise unless the attention of every slot can serve its tokens, and provides what the reducer reads."""
    for slot in slots:
        if slot.grid.reduced:
            slot.attn.check(slot.grid)
        reducer = slot.block.reducer if isinstance(slot.block, Reducing) else None
        if reducer is not None and not reducer.first and (missing := reducer.reads - slot.attn.provides):
            raise UserError(
                f"reducer {reducer.name} in {slot.name} reads the {', '.join(missing)} of {slot.attn.spec}, which "
                "does not provide it"
            )


def reducing(model: nn.Module) -> list[Reducing]:
    """The blocks of a model that compute with reduced tokens."""
    return [module for module in model.modules() if isinstance(module, Reducing)]


def tokens_of(model: nn.Module) -> str:
    """The spec of the reducer in such a model; empty if there is none."""
    return next((str(block.reducer.spec) for block in reducing(model) if block.reducer is not None), "")
