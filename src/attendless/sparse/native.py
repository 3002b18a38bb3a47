"""Calls of the compiled kernels with tensors: `functions` has one function for each operation of `table`.

Forward kernels read q, k and v in f32 or bf16 without a copy and write their result in the type of q, which decides
what they compute: f32, or products of bf16 with sums in f32, as `bf16` defines. Everything else is f32. Tensors of
other floating types, and those of which the table lists f32 only, are copied into f32 first.

A tensor reaches the compiled module as a DLPack capsule, which carries its address, shape, strides and element type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from ..compiled import (
    available,
    forced,
    instruction_set,
    instruction_sets,
    kernels,
    reason,
)
from ..errors import UserError
from .descriptions import I32, Attribute, Operation, Result, TensorArg, flatten, is_wanted, shape, size
from .table import OPERATIONS

__all__ = ["available", "forced", "functions", "instruction_set", "instruction_sets", "reason"]

#: Larger tensors are refused before they are copied or allocated: an expanded tensor has any size and no memory.
_MOST = 2**31
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def threading() -> str:
    """Why each call starts its own threads, at some 20 µs each; empty if it uses those of PyTorch's OpenMP."""
    return str(kernels().why_own_threads()) if available else ""


def function(op: Operation) -> Callable[..., Any]:
    """The function that calls an operation's kernel: arguments as in its schema, tensors on the CPU."""
    flat = flatten(op)
    takes = [(op.index(x.name), _reader(op, x)) for x in op.flat if isinstance(x, TensorArg) or x in op.attributes]
    makes = [_maker(op, result) for result in op.results]
    finishes = [(i, _finisher(op, result)) for i, result in enumerate(op.results) if result.returned]
    single = len(finishes) == 1

    def run(*arguments: Any) -> Any:
        kernel = getattr(kernels(), op.name)
        given = flat(arguments)
        passed = [take(given[i]) for i, take in takes]
        made = [make(given) for make in makes]
        try:
            kernel(*passed, torch.get_num_threads(), *[None if x is None else to_dlpack(x) for x in made])
        except ValueError as error:
            raise UserError(f"{op.name}: {error}; given {_shapes(op, given)}") from None
        if single:
            i, finish = finishes[0]
            return finish(made[i], given)
        return tuple([finish(made[i], given) for i, finish in finishes])

    run.__name__, run.__doc__ = op.name, op.about
    return run


def _shapes(op: Operation, given: Sequence[Any]) -> str:
    """The tensors of a call with their shapes."""
    named = zip(op.flat, given, strict=True)
    return ", ".join(f"{x.name} {list(value.shape)}" for x, value in named if isinstance(value, Tensor))


# Arguments -----------------------------------------------------------------------------------------------------------


def _reader(op: Operation, argument: TensorArg | Attribute) -> Callable[[Any], Any]:
    """A function that makes of an argument what the compiled module takes."""
    if isinstance(argument, Attribute):
        return list if argument.is_plan else _same
    name, axes, optional, packed = argument.name, argument.axes, argument.optional, argument.packed
    dtypes = tuple(element.dtype for element in argument.elements)
    rank, omitted = len(axes), axes.index(argument.omits) if argument.omits else None

    def read(x: Tensor | None) -> Any:
        if x is None:  # PyTorch passes None for a required tensor too
            if optional:
                return None
            raise UserError(f"{op.name}: {name} is missing, expected a tensor [{', '.join(axes)}]")
        if x.ndim != rank:
            if omitted is None or x.ndim != rank - 1:
                raise UserError(f"{op.name}: {name} must be [{', '.join(axes)}], got {list(x.shape)}")
            x = x.unsqueeze(omitted)
        if x.dtype not in dtypes:
            x = _converted(op, argument, x)
        if packed:
            if not x.is_contiguous():
                x = _bounded(x).contiguous()
        elif x.shape[-1] > 1 and x.stride(-1) != 1:
            x = _bounded(x).contiguous()
        return to_dlpack(x)

    return read


def _same(x: Any) -> Any:
    return x


def _converted(op: Operation, argument: TensorArg, x: Tensor) -> Tensor:
    """A tensor in the first of an argument's element types."""
    wanted = argument.elements[0]
    if wanted.dtype.is_floating_point and x.is_floating_point():
        return _bounded(x).to(wanted.dtype)
    if wanted is I32 and x.dtype in _INTEGERS:
        # Clamped, not cut off: an index that does not fit stays out of range.
        return _bounded(x).clamp(-(2**31), 2**31 - 1).to(torch.int32) if x.dtype is torch.int64 else x.to(torch.int32)
    names = " or ".join(str(element.dtype) for element in argument.elements)
    raise UserError(f"{op.name}: {argument.name} must be a tensor of {names}, got {x.dtype}")


def _bounded(x: Tensor) -> Tensor:
    if x.numel() > _MOST:
        raise UserError(f"a tensor of {list(x.shape)} is too large for the native kernels")
    return x


# Results -------------------------------------------------------------------------------------------------------------


def _maker(op: Operation, result: Result) -> Callable[[Sequence[Any]], Tensor | None]:
    """A function of the arguments that allocates a result; None: the kernel need not write it."""
    if not result.returned:
        return lambda given: None
    sizes, wanted = shape(op, result), is_wanted(op, result)
    dtypes = tuple(element.dtype for element in result.elements)
    like = op.index(result.like) if result.like else None
    limits = [(x.name, op.index(x.name), size(op, x.most)) for x in op.attributes if x.most in result.axes]
    always, turned = not result.wanted, result.tokens_first

    def make(given: Sequence[Any]) -> Tensor | None:
        if not (always or wanted(given)):
            return None
        for name, at, most in limits:
            if not 1 <= given[at] <= most(given):
                raise UserError(f"{op.name}: {name} must be from 1 to {most(given)}, got {given[at]}")
        dtype = dtypes[0]
        if like is not None and given[like].dtype in dtypes:
            dtype = given[like].dtype
        axes = sizes(given)
        if math.prod(axes) > _MOST:
            raise UserError(f"{op.name}: {result.name} of {axes} is too large for the native kernels")
        x = torch.empty(axes, dtype=dtype)
        return x.transpose(1, 2) if turned else x

    return make


def _finisher(op: Operation, result: Result) -> Callable[[Tensor | None, Sequence[Any]], Tensor]:
    """A function that makes of what a kernel wrote what the operator returns."""
    like = op.index(result.like) if result.like else None

    def finish(x: Tensor | None, given: Sequence[Any]) -> Tensor:
        if x is None:
            return torch.empty(0)
        if result.over_heads:
            x = x.sum(1)
        if like is not None and given[like].dtype is not x.dtype:
            x = x.to(given[like].dtype)
        return x

    return finish


#: `functions.foveal(q, k, v, …)` and so on, by the names of the table.
functions = SimpleNamespace(**{op.name: function(op) for op in OPERATIONS})
