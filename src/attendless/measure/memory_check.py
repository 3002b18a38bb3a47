"""Check whether a batch fits into memory before it runs: the system kills a process that takes too much.

The estimate is a formula of the layers' shapes. One image takes its pixels and, at the widest layer, the input and
output of the linear layers beside the residual stream. An attention that takes more memory than full attention is not
covered; for these, the child process that measures memory runs first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..backbones import is_backbone
from ..errors import UserError
from ..integrations.discovery import exchangeable, find_slots
from ..integrations.rebuild.architecture import describe, describes
from ..sizes import channels, size_text
from .memory import available


def stand_in(model: nn.Module) -> Any:
    """A model of the same shapes on the meta device, whose layers can be counted; None if there is none."""
    if is_backbone(model):
        return model
    if not describes(model):
        return None
    try:
        with torch.device("meta"):
            return describe(model).build()
    except UserError:
        return None


def bytes_per_image(model: nn.Module, size: tuple[int, int]) -> int:
    """A lower bound of the bytes that one image takes in a forward pass without gradients; weights do not count."""
    counted = model if exchangeable(model) else stand_in(model)
    widest = 0
    for slot in find_slots(counted) if counted is not None else ():
        maps = [layer for layer in slot.block.modules() if isinstance(layer, nn.Linear)]
        wide, narrow = max(m.out_features for m in maps), min(m.out_features for m in maps)
        widest = max(widest, slot.grid.tokens * 2 * (wide + narrow))
    return (channels(model) * size[0] * size[1] + widest) * next(model.parameters()).element_size()


def check_room(model: nn.Module, size: tuple[int, int], batch: int, left: int | None = None) -> None:
    """Raise unless a batch fits into `left` bytes (default: the free memory of the system). CPU only."""
    left = available() if left is None else left
    if left is None or next(model.parameters()).device.type != "cpu":
        return
    image = bytes_per_image(model, size)
    if batch * image > left:
        raise UserError(
            f"batch {batch} at {size_text(size)} px takes about {batch * image / 1e9:,.1f} GB for images and "
            f"activations, and {left / 1e9:,.1f} GB are free: expected a batch of at most {left // image}"
        )


@contextlib.contextmanager
def told_if_full(size: tuple[int, int], batch: int) -> Iterator[None]:
    """Turn out-of-memory errors of any allocator into a `UserError` of one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"batch {batch} at {size_text(size)} px does not fit into memory: expected a smaller batch or size"
        ) from None
