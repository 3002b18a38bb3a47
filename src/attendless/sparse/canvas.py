"""Frames of a video interleaved on one canvas, so that square blocks of the canvas are boxes in space and time.

Four frames interleave by 2 × 2 patches:

    frames   0 0 1 1 0 0 1 1 …        a block of 2 × 2 on the canvas:  2 × 2 patches of one frame
    of a     0 0 1 1 0 0 1 1 …                    4 × 4                the same 2 × 2 patches in four frames
    canvas   2 2 3 3 2 2 3 3 …                    8 × 8                4 × 4 patches in four frames
             2 2 3 3 2 2 3 3 …

The next four frames follow below. The kernels that cut a grid into square cells and tiles thereby cut a video into
boxes. If a side is odd, or the number of frames is not a multiple of four, some positions of the canvas stay empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT = 2


def sides(depth: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of the canvas for `depth` frames of height × width. A single frame is its own canvas."""
    if depth == 1:
        return height, width
    down, across = _frames(depth)
    groups = -(-depth // (down * across))
    return groups * down * _whole(height), across * _whole(width)


def places(depth: int, height: int, width: int, device: torch.device | None = None) -> Tensor:
    """The position of each patch on the canvas, in token order: [depth · height · width]."""
    down, across = _frames(depth)
    frame, y, x = (torch.arange(count, device=device) for count in (depth, height, width))
    group, inside = frame // (down * across), frame % (down * across)
    row = (y // _UNIT * down + (inside // across)[:, None]) * _UNIT + y % _UNIT
    row = row + (group * down * _whole(height))[:, None]
    column = (x // _UNIT * across + (inside % across)[:, None]) * _UNIT + x % _UNIT
    return (row[:, :, None] * sides(depth, height, width)[1] + column[:, None, :]).flatten()


def _frames(depth: int) -> tuple[int, int]:
    """The number of frames that interleave, vertically and horizontally."""
    return (1 if depth <= 2 else 2), min(depth, 2)


def _whole(side: int) -> int:
    return -(-side // _UNIT) * _UNIT
