"""Operators of a PyTorch graph as nodes of an ONNX graph, where the exporter does not know them.

A sort that keeps the order of equals is ONNX's TopK, which promises just that. attendless's own operators become nodes
of the domain `attendless`, for runtimes that have the kernels as an extension:

    FovealAttention       q, k, v [, key_bias] [, places]                          layout, scale
    SparsifinerAttention  q, k, v, coefficients, basis [, tail_scores, tail_values, share] [, key_bias]
                                                                                   budget, prefix, tau, top, scale
    BlockAttention        q, k, v, query_start, queries, key_start, keys           scale
    GatherAttention       q, k, v, indices [, counts] [, key_bias]                 scale
    MergeTokens           x, keys [, importance] [, sizes] [, cells] [, owners]    plan, protect

Each has an attribute `given`: the names of its inputs, in order, with commas between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

DOMAIN = "attendless"
_TENSORS = ["tensor(float)", "tensor(int32)", "tensor(int64)", "tensor(bool)"]


def standard() -> dict[Any, Callable[..., Any]]:
    """What standard operators can say."""
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
        """As a formula. The exporter's own multiplies keys too, and hides the pattern that runtimes look for."""
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
    """What becomes a node of ours."""
    import onnxscript

    def unread() -> Any:
        """In place of each query's log Σ exp."""
        return onnxscript.opset18.Constant(value_float=0.0)

    def foveal(q: Any, k: Any, v: Any, key_bias: Any, places: Any, layout: Sequence[int], scale: float) -> Any:
        inputs = {"q": q, "k": k, "v": v, "key_bias": key_bias, "places": places}
        return _node("FovealAttention", inputs, layout=list(layout), scale=scale)

    def sparsifiner(
        q: Any,
        k: Any,
        v: Any,
        key_bias: Any,
        coefficients: Any,
        basis: Any,
        tail_scores: Any,
        tail_values: Any,
        share: Any,
        budget: int,
        prefix: int,
        tau: float,
        top: int,
        scale: float,
    ) -> Any:
        tail = {"tail_scores": tail_scores, "tail_values": tail_values, "share": share}
        inputs = {"q": q, "k": k, "v": v, "coefficients": coefficients, "basis": basis, **tail, "key_bias": key_bias}
        return _node("SparsifinerAttention", inputs, budget=budget, prefix=prefix, tau=tau, top=top, scale=scale)

    def block(q: Any, k: Any, v: Any, key_bias: Any, lists: Sequence[Any], scale: float) -> Any:
        named = dict(zip(("query_start", "queries", "key_start", "keys"), lists, strict=True))
        return _node("BlockAttention", {"q": q, "k": k, "v": v, **named, "key_bias": key_bias}, scale=scale), unread()

    def gather(q: Any, k: Any, v: Any, key_bias: Any, indices: Any, counts: Any, scale: float) -> Any:
        inputs = {"q": q, "k": k, "v": v, "indices": indices, "counts": counts, "key_bias": key_bias}
        return _node("GatherAttention", inputs, scale=scale), unread()

    def merge(
        x: Any,
        keys: Any,
        importance: Any,
        sizes: Any,
        cells: Any,
        owners: Any,
        plan: Sequence[int],
        protect: float,
    ) -> Any:
        past = {"sizes": sizes, "cells": cells, "owners": owners}
        inputs = {"x": x, "keys": keys, "importance": importance, **past}
        return _node("MergeTokens", inputs, outputs=4, plan=list(plan), protect=protect)

    ops = torch.ops.attendless
    return {
        ops.foveal_forward.default: foveal,
        ops.sparsifiner.default: sparsifiner,
        ops.block_attend.default: block,
        ops.gather_attend.default: gather,
        ops.merge.default: merge,
    }


def _node(name: str, inputs: Mapping[str, Any], *, outputs: int = 1, **attributes: Any) -> Any:
    """One node with the inputs that are there. A recorder takes only what has a schema, so it gets one."""
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    given = {key: value for key, value in inputs.items() if value is not None}
    attributes = {**attributes, "given": ",".join(given)}
    kinds = {int: "INT", float: "FLOAT", str: "STRING", list: "INTS"}
    schema = OpSchema(
        name,
        DOMAIN,
        1,
        inputs=[OpSchema.FormalParameter(key, f"T{i}") for i, key in enumerate(given)],
        outputs=[OpSchema.FormalParameter(f"out{i}", f"O{i}") for i in range(outputs)],
        type_constraints=[
            *((f"T{i}", _TENSORS, "") for i in range(len(given))),
            *((f"O{i}", _TENSORS, "") for i in range(outputs)),
        ],
        attributes=[
            OpSchema.Attribute(key, getattr(OpSchema.AttrType, kinds[type(value)])) for key, value in attributes.items()
        ],
    )
    return Op(Opset(DOMAIN, 1), name, schema)(*given.values(), **attributes)
