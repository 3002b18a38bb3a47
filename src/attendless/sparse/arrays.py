"""Tensors as the compiled kernels take them, and room for what they give: arrays over the same memory, or copies where
that will not do.

Shapes: B batch · H heads · N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

_FLOAT = (torch.float32,)
_FORWARD = (torch.float32, torch.bfloat16)


def heads(x: Tensor) -> Any:
    """What a forward pass takes: as `rows`, or of bfloat16."""
    return rows(x, _FORWARD)


def rows(x: Tensor, types: Sequence[torch.dtype] = _FLOAT) -> Any:
    """[B, H, N, ·] as an array of 32-bit floats with adjacent channels; no copy if it is one already."""
    if x is None or x.ndim != 4:  # an operator hands on None, whatever its signature says
        given = None if x is None else list(x.shape)
        raise UserError(f"the native kernels take [batch, heads, tokens, channels], not {given}")
    return channels(x, types)


def channels(x: Tensor, types: Sequence[torch.dtype] = _FLOAT) -> Any:
    """As an array of such floats with adjacent channels, whatever comes before them."""
    if x.dtype not in types:
        x = within_reason(x).float()
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = within_reason(x).contiguous()
    return array(x.detach())


def array(x: Tensor) -> Any:
    """NumPy knows no bfloat16: the kernels take its bits."""
    return x.view(torch.int16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


def tokens(x: Tensor) -> Any:
    """[B, N, ·] as such an array."""
    if x is None or x.ndim != 3:
        given = None if x is None else list(x.shape)
        raise UserError(f"merging takes [batch, tokens, channels], not {given}")
    return channels(x)


def by_head(keys: Tensor) -> Tensor:
    """Keys [B, N, D] as those of one head; anything else is left to be judged."""
    return keys[:, None] if keys is not None and keys.ndim == 3 else keys


def within_reason(x: Tensor) -> Tensor:
    """Asked before a copy is made: an expanded tensor has any size and no memory."""
    if x.numel() > 2**31:
        raise UserError(f"a tensor of {list(x.shape)} is too large for the native kernels")
    return x


def floats(x: Tensor | None) -> Any:
    """A whole array of 32-bit floats."""
    if x is None:
        return None
    if x.dtype is not torch.float32 or not x.is_contiguous():  # to ask costs less than to convert what is right
        x = within_reason(x).to(torch.float32).contiguous()
    return x.detach().numpy()


def tables(x: Tensor | None) -> Any:
    """[rows, columns], or such a table for each image, as [1 or B, rows, columns]."""
    return floats(x if x is None or x.ndim != 2 else x[None])


def ints(x: Tensor | None) -> Any:
    """Numbers of tokens and the like in 32 bits. What does not fit becomes the largest or smallest that does: as wrong
    as it was, where cutting it off could make it right."""
    if x is None:
        return None
    if x.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise UserError(f"expected a tensor of int32 or int64 numbers, got {x.dtype}")
    if within_reason(x).dtype is torch.int64:
        x = x.clamp(-(2**31), 2**31 - 1)
    return x.detach().to(torch.int32).contiguous().numpy()


def longs(x: Tensor | None) -> Any:
    """Numbers of cells and tokens as PyTorch's own functions have them, in 64 bits."""
    if x is None:
        return None
    if x.dtype is not torch.int64:
        raise UserError(f"expected a tensor of int64 numbers, got {x.dtype}")
    return within_reason(x).detach().contiguous().numpy()


def room(like: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """For a result [B, H, N, width] that lies in memory as [B, N, H, width]."""
    B, H, N, _ = like.shape
    return torch.empty((B, N, H, width), dtype=dtype).transpose(1, 2)


def results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what an attention gives, and for log Σ exp of each query's scores."""
    dtype = q.dtype if q.dtype in _FORWARD else torch.float32
    return room(q, v.shape[-1], dtype), torch.empty(q.shape[:3], dtype=torch.float32)


def typed(x: Tensor, like: Tensor) -> Tensor:
    return x if like.dtype is x.dtype else x.to(like.dtype)


def call(function: Any, *arguments: Any) -> Any:
    """Call a kernel; what it refuses is an error of whoever gave it."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(f"{function.__name__}: {error}") from None
    except TypeError:
        given = [list(x.shape) if hasattr(x, "shape") else x for x in arguments]
        raise UserError(f"{function.__name__} does not take arguments of these shapes: {given}") from None
