"""Traced graphs as ONNX nodes: what PyTorch's exporter does not know, or writes in a form that runtimes do not fuse.

`standard` covers PyTorch's own operators. `kernels` turns `torch.ops.attendless.*` into nodes of the domain
`attendless`, for runtimes that have the kernels as an extension. Names, inputs and attributes of the nodes are those of
`sparse.table`; docs/writing-a-kernel.md lists them.

Each node of `attendless` has an attribute `given`: the names of its inputs, in order, with commas between them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from ..sparse.descriptions import Attribute, Operation, flatten
from ..sparse.table import NODES

DOMAIN = "attendless"
_TENSORS = ["tensor(float)", "tensor(int32)", "tensor(int64)", "tensor(bool)"]
#: ONNX's names for the types of attributes.
_KINDS = {int: "INT", float: "FLOAT", str: "STRING"}


def standard() -> dict[Any, Callable[..., Any]]:
    """Translations of PyTorch's operators into standard ONNX."""
    import onnxscript

    op: Any = onnxscript.opset18

    def sort(self: Any, stable: bool = False, dim: int = -1, descending: bool = False) -> Any:
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, size, axis=dim, largest=descending, sorted=True)

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """As a formula. The exporter's own multiplies keys too, which hides the pattern that runtimes fuse."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        turned = op.Transpose(key, perm=[*range(len(key.shape) - 2), len(key.shape) - 1, len(key.shape) - 2])
        scores = op.MatMul(op.Mul(query, op.Constant(value_float=scale)), turned)
        if attn_mask is not None and attn_mask.dtype == onnxscript.ir.DataType.BOOL:
            attn_mask = op.Where(attn_mask, op.Constant(value_float=0.0), op.Constant(value_float=-math.inf))
        if attn_mask is not None:
            scores = op.Add(scores, attn_mask)
        return op.MatMul(op.Softmax(scores, axis=-1), value)

    return {torch.ops.aten.sort.stable: sort, torch.ops.aten.scaled_dot_product_attention.default: attention}


def kernels() -> dict[Any, Callable[..., Any]]:
    """Translations of the kernels' operators into nodes of the domain `attendless`."""
    return {getattr(torch.ops.attendless, op.name).default: translation(op) for op in NODES.values()}


def translation(op: Operation) -> Callable[..., Any]:
    """The function that turns a call of an operator into its node."""
    import onnxscript

    flat = flatten(op)
    names = [argument.name for argument in op.flat]
    kept = [result.in_node for result in op.returned]

    def translate(*given: Any) -> Any:
        values = dict(zip(names, flat(given), strict=True))
        found = _node(op, values)
        made = iter([found] if sum(kept) == 1 else found)
        # A result that the node does not have, log Σ exp, is never read in an exported graph.
        results = [next(made) if keep else onnxscript.opset18.Constant(value_float=0.0) for keep in kept]
        return results[0] if len(results) == 1 else tuple(results)

    # The exporter matches arguments by the function's signature.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(argument.name, kind) for argument in op.arguments]
    translate.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return translate


def _node(op: Operation, values: dict[str, Any]) -> Any:
    """One node with the inputs that are not None. The recorder only takes nodes with a schema."""
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    given = {tensor.name: values[tensor.name] for tensor in op.tensors if values[tensor.name] is not None}
    attributes = {x.name: list(values[x.name]) if x.is_plan else values[x.name] for x in op.attributes}
    outputs = sum(result.in_node for result in op.returned)
    schema = OpSchema(
        op.node,
        DOMAIN,
        1,
        inputs=[OpSchema.FormalParameter(key, f"T{i}") for i, key in enumerate(given)],
        outputs=[OpSchema.FormalParameter(f"out{i}", f"O{i}") for i in range(outputs)],
        type_constraints=[
            *((f"T{i}", _TENSORS, "") for i in range(len(given))),
            *((f"O{i}", _TENSORS, "") for i in range(outputs)),
        ],
        attributes=[
            OpSchema.Attribute(name, getattr(OpSchema.AttrType, kind)) for name, kind in node_attributes(op).items()
        ],
    )
    return Op(Opset(DOMAIN, 1), op.node, schema)(*given.values(), **attributes, given=",".join(given))


def node_attributes(op: Operation) -> dict[str, str]:
    """The attributes of a node and their ONNX types."""

    def kind(attribute: Attribute) -> str:
        return "INTS" if attribute.is_plan else _KINDS[attribute.kind]

    return {attribute.name: kind(attribute) for attribute in op.attributes} | {"given": "STRING"}
