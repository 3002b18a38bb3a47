"""The vocabulary in which `table` describes the operations of the compiled kernels.

One `Operation` names its tensors (shape and element types), its attributes and its results. Everything that has to
agree on them is derived from the description:

    ops.py               the PyTorch operator: schema, result shapes for tracing, autograd, autocast, FLOP count
    native.py            the call of the kernel: conversion of tensors, allocation of results, error messages
    export/translate.py  the ONNX and OpenVINO node
    native/generate.py   `native/operations.hpp` (the arguments in C++, for Python and the runtimes) and the table in
                         docs/writing-a-kernel.md

A shape is a text of axis names. An axis of a result is an axis of an argument ("B"), an integer attribute ("budget"),
or a property of a plan ("layout.tiles").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

#: No number of a plan, such as a grid's height, is larger. `kLargest` in native/checks.hpp is the same.
LARGEST = 2**24


@dataclasses.dataclass(frozen=True)
class Element:
    """A type of number: its name in C++'s `Element` and in the docs, its PyTorch type, and its C++ type."""

    name: str
    dtype: torch.dtype
    cpp: str


F32 = Element("f32", torch.float32, "float")
BF16 = Element("bf16", torch.bfloat16, "Bf16")
I8 = Element("i8", torch.int8, "int8_t")
I32 = Element("i32", torch.int32, "int32_t")
I64 = Element("i64", torch.int64, "int64_t")
#: Every element type the C++ code has a name for. Which of them a tensor may have is up to its `TensorArg`.
ELEMENTS = (F32, BF16, I8, I32, I64)


@dataclasses.dataclass(frozen=True)
class TensorArg:
    """A tensor that a kernel reads.

    The kernel reads the `elements` in place; other floating types are copied into the first. The last axis has stride
    1; a `packed` tensor is contiguous as a whole. The caller may leave out the axis named `omits`, which then has size
    1. In an exported graph the tensor may be `part` 0, 1 or 2 of a packed qkv tensor [B, N, 3, H, D].
    """

    name: str
    shape: str
    elements: tuple[Element, ...] = (F32,)
    optional: bool = False
    packed: bool = False
    omits: str = ""
    part: int | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.shape.split())


@dataclasses.dataclass(frozen=True)
class TensorList:
    """Tensors that PyTorch's operator takes as one list, and kernels and nodes as arguments of their own."""

    name: str
    tensors: tuple[TensorArg, ...]


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A number, or a plan: a dataclass whose integer fields travel as a list, in the order of their declaration.

    An integer with `most` must be from 1 to the size of that axis. `default` is what a node without it means.
    """

    name: str
    kind: type
    most: str = ""
    default: int = 0

    @property
    def is_plan(self) -> bool:
        return dataclasses.is_dataclass(self.kind)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of a plan's integers."""
        if not self.is_plan:
            return ()
        return tuple(field.name for field in dataclasses.fields(self.kind) if field.type in (int, "int"))

    @property
    def required(self) -> int:
        """How many of a plan's integers have no default; later versions add fields with one."""
        fields = dataclasses.fields(self.kind)
        return sum(field.name in self.fields and field.default is dataclasses.MISSING for field in fields)

    @property
    def schema(self) -> str:
        return "int[]" if self.is_plan else self.kind.__name__


Argument = TensorArg | TensorList | Attribute


@dataclasses.dataclass(frozen=True)
class Result:
    """A tensor that a kernel writes.

    It has the element type of the argument `like`, if the kernel writes that, or else the first of `elements`; a result
    of another type than `like` is converted. With `tokens_first` [B, H, N, ·] lies in memory as [B, N, H, ·].
    `returned`: the operator returns it. `in_node`: exported nodes do. `wanted`: the bool attribute that asks for it; it
    is empty otherwise, and with `over_heads` the sum of the kernel's result over the heads.
    """

    name: str
    shape: str
    elements: tuple[Element, ...] = (F32,)
    like: str = ""
    tokens_first: bool = False
    returned: bool = True
    in_node: bool = True
    wanted: str = ""
    over_heads: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.shape.split())


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of the kernels.

    `gradient` names the operation that computes gradients (see `backward`). An operation for inference says in
    `instead` what to call to train. `node` names the ONNX and OpenVINO node; an operation without one is not exported.
    `flops` counts operations as PyTorch does, two for a multiply-add, from shapes or, if `flops_of_values`, tensors.
    """

    name: str
    about: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    flops: Callable[..., int]
    flops_of_values: bool = False
    gradient: str = ""
    instead: str = ""
    node: str = ""

    @property
    def flat(self) -> tuple[TensorArg | Attribute, ...]:
        """The arguments as kernels and nodes take them: each tensor of a list by itself."""
        lists = [x.tensors if isinstance(x, TensorList) else (x,) for x in self.arguments]
        return tuple(argument for group in lists for argument in group)

    @property
    def tensors(self) -> tuple[TensorArg, ...]:
        return tuple(x for x in self.flat if isinstance(x, TensorArg))

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """All but those that only ask for a result."""
        asks = {result.wanted for result in self.results}
        return tuple(x for x in self.flat if isinstance(x, Attribute) and x.name not in asks)

    @property
    def returned(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.returned)

    def index(self, name: str) -> int:
        """Where among the flat arguments one stands."""
        return [argument.name for argument in self.flat].index(name)


def schema(op: Operation) -> str:
    """An operator's signature, as `torch.library` reads it."""

    def text(argument: Argument) -> str:
        if isinstance(argument, Attribute):
            return f"{argument.schema} {argument.name}"
        if isinstance(argument, TensorList):
            return f"Tensor[] {argument.name}"
        return f"Tensor{'?' if argument.optional else ''} {argument.name}"

    results = ", ".join(["Tensor"] * len(op.returned))
    one = len(op.returned) == 1
    return f"{op.name}({', '.join(map(text, op.arguments))}) -> {results if one else f'({results})'}"


def flatten(op: Operation) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that makes of an operator's arguments those of `op.flat`."""
    at = [i for i, argument in enumerate(op.arguments) if isinstance(argument, TensorList)]
    if not at:
        return lambda given: given
    (only,) = at
    argument = op.arguments[only]
    assert isinstance(argument, TensorList)
    names = [tensor.name for tensor in argument.tensors]

    def flat(given: Sequence[Any]) -> Sequence[Any]:
        if len(given[only]) != len(names):
            raise UserError(f"{op.name}: {argument.name} must be {len(names)} tensors, {', '.join(names)}")
        return [*given[:only], *given[only], *given[only + 1 :]]

    return flat


# Result shapes -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _plan(attribute: Attribute, *numbers: int) -> Any:
    """Cached: a model asks for the same few plans, and making one takes microseconds."""
    names = attribute.fields
    if not attribute.required <= len(numbers) <= len(names) or not all(0 <= x <= LARGEST for x in numbers):
        given = f"got {list(numbers)}"
        raise UserError(
            f"{attribute.name} must be {len(names)} integers from 0 to {LARGEST} ({', '.join(names)}), {given}"
        )
    return attribute.kind(*numbers)


def size(op: Operation, axis: str) -> Callable[[Sequence[Any]], int]:
    """A function of the flat arguments: the size of one axis of a result."""
    owner, _, name = axis.partition(".")
    for at, argument in enumerate(op.flat):
        if isinstance(argument, Attribute):
            if argument.name == owner:
                return _of_plan(argument, at, name) if name else lambda given, at=at: given[at]  # type: ignore[misc]
        elif axis in argument.axes and not (argument.optional or argument.omits):
            place = argument.axes.index(axis)
            return lambda given, at=at, place=place: given[at].shape[place]  # type: ignore[misc]
    raise ValueError(f"{op.name}: no argument has an axis {axis!r}")


def _of_plan(attribute: Attribute, at: int, name: str) -> Callable[[Sequence[Any]], int]:
    def found(given: Sequence[Any]) -> int:
        try:
            return int(getattr(_plan(attribute, *given[at]), name))
        except ZeroDivisionError:
            raise UserError(f"{attribute.name} {list(given[at])}: every side must be at least 1") from None

    return found


def shape(op: Operation, result: Result) -> Callable[[Sequence[Any]], list[int]]:
    """A function of the flat arguments: a result's shape, in the order of its memory."""
    sizes = [size(op, axis) for axis in result.axes]
    if result.tokens_first:
        sizes[1], sizes[2] = sizes[2], sizes[1]
    return lambda given: [one(given) for one in sizes]


def is_wanted(op: Operation, result: Result) -> Callable[[Sequence[Any]], bool]:
    """A function of the flat arguments: whether a result is asked for."""
    if not result.wanted:
        return lambda given: True
    asked, like = op.index(result.wanted), op.index(result.like)
    return lambda given: given[asked] and given[like] is not None


def fake(op: Operation) -> Callable[..., Any]:
    """Results without values, for tracing."""
    flat, parts = flatten(op), []
    tensor = next(i for i, argument in enumerate(op.flat) if isinstance(argument, TensorArg))
    for result in op.returned:
        like = op.index(result.like) if result.like else None
        axes = (result.axes[0], *result.axes[2:]) if result.over_heads else result.axes
        parts.append(
            (result, shape(op, dataclasses.replace(result, shape=" ".join(axes))), is_wanted(op, result), like)
        )

    def run(*arguments: Any) -> Any:
        given = flat(arguments)
        made = []
        for result, sizes, wanted, like in parts:
            if not wanted(given):
                made.append(given[tensor].new_empty(0, dtype=result.elements[0].dtype))
                continue
            dtype = result.elements[0].dtype if like is None else given[like].dtype
            x: Tensor = given[tensor].new_empty(sizes(given), dtype=dtype)
            made.append(x.transpose(1, 2) if result.tokens_first else x)
        return made[0] if len(made) == 1 else tuple(made)

    return run


# Gradients -----------------------------------------------------------------------------------------------------------


def backward(op: Operation, name: str, flops: Callable[..., int]) -> Operation:
    """The operation that computes the gradients of q, k, v and, if `bias_grad` asks, key_bias.

    The forward operation has the arguments q, k, v, key_bias and others, and the results out, lse and others. Backward
    has all of them, and computes in f32.
    """
    arguments = {argument.name: argument for argument in op.arguments}
    q, k, v, key_bias = (_floats(arguments.pop(name)) for name in ("q", "k", "v", "key_bias"))
    made = {result.name: TensorArg(result.name, result.shape, result.elements, packed=True) for result in op.results}
    out, lse = dataclasses.replace(v, name="out"), made["lse"]
    others = [*arguments.values(), *(made[result.name] for result in op.results[2:] if result.name not in arguments)]
    heads = [Result(f"{x.name}_grad", x.shape, like=x.name, tokens_first=True) for x in (q, k, v)]
    bias = Result("key_bias_grad", "B H N", like="key_bias", wanted="bias_grad", over_heads=True)
    return Operation(
        name,
        f"the gradients of `{op.name}`",
        (dataclasses.replace(v, name="out_grad"), q, k, v, out, lse, key_bias, *others, Attribute("bias_grad", bool)),
        (*heads, bias),
        flops,
        flops_of_values=op.flops_of_values,
    )


def _floats(argument: Argument) -> TensorArg:
    assert isinstance(argument, TensorArg)
    return dataclasses.replace(argument, elements=(F32,), part=None)
