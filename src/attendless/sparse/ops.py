"""The compiled kernels as PyTorch operators, `torch.ops.attendless.*`, registered from the descriptions in `table`.

Each has a schema, result shapes for tracing (so `torch.compile` and `torch.export` go through it), a gradient or a
message that it has none, an autocast rule (compute in f32) and a FLOP count. The operators are registered whether or
not the kernels are compiled; without them, a call raises with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

from ..errors import UserError
from . import native
from .descriptions import Operation, fake, schema
from .table import OPERATIONS

#: Stands where a tensor stood that PyTorch keeps for the backward pass.
_SAVED = object()


def register(library: torch.library.Library, op: Operation, run: Callable[..., Any]) -> None:
    """Define an operator in a library by its description. `run` computes it on the CPU."""
    name = f"{library.ns}::{op.name}"
    library.define(schema(op), tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    library.impl(op.name, run, "CPU")
    torch.library.register_fake(name, fake(op), lib=library)
    torch.library.register_autocast(name, "cpu", torch.float32, lib=library)
    if op.instead:
        _refuse_gradient(library, name, op.instead)
    if op.gradient:
        _differentiate(library, name, op.gradient)

    def count(*arguments: Any, **_: Any) -> int:
        return op.flops(*arguments)

    register_flop_formula(getattr(getattr(torch.ops, library.ns), op.name), get_raw=op.flops_of_values)(count)


def _refuse_gradient(library: torch.library.Library, name: str, instead: str) -> None:
    def backward(ctx: Any, *_: Any) -> Any:
        raise UserError(f"{name} has no gradient: it is for inference. To train, {instead}")

    torch.library.register_autograd(name, backward, lib=library)


def _differentiate(library: torch.library.Library, name: str, backward_name: str) -> None:
    """The gradient of an operator (q, k, v, key_bias, *more) -> (out, lse, *made), by a backward operator that is given
    key_bias, more and made."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, *more = inputs
        out, lse, *made = output
        ctx.mark_non_differentiable(lse, *made)
        # PyTorch must save tensors, alone or in a list; numbers are kept as they are.
        leaves, ctx.structure = pytree.tree_flatten([*more, *made])
        ctx.plain = [_SAVED if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.save_for_backward(q, k, v, out, lse, *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        # The gradient of a list of tensors is a list.
        ctx.nothing = [[None] * len(x) if isinstance(x, list) and isinstance(x[0], Tensor) else None for x in more[1:]]

    def backward(ctx: Any, out_grad: Tensor, *_: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        tensors = iter(saved)
        more = pytree.tree_unflatten([next(tensors) if x is _SAVED else x for x in ctx.plain], ctx.structure)
        wants_bias = ctx.needs_input_grad[3]
        run = getattr(getattr(torch.ops, library.ns), backward_name)
        *grads, bias = run(out_grad, q, k, v, out, lse, *more, wants_bias)
        return (*grads, bias if wants_bias else None, *ctx.nothing)

    torch.library.register_autograd(name, backward, setup_context=setup, lib=library)


_library = torch.library.Library("attendless", "FRAGMENT")
for _operation in OPERATIONS:
    register(_library, _operation, getattr(native.functions, _operation.name))
