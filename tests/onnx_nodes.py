"""ONNX graphs of attendless's nodes, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

OURS = "attendless"


def model_of(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: Sequence[Any] = ()) -> Any:
    from onnx import helper

    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    sets = [helper.make_opsetid("", 18), helper.make_opsetid(OURS, 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=10)


def node_model(name: str, inputs: dict[str, Tensor], *, dynamic: bool, **attributes: Any) -> Any:
    """A graph of one node. With `dynamic` it knows the number of axes of what comes, and no more."""
    from onnx import TensorProto, helper

    kinds = {"torch.float32": TensorProto.FLOAT, "torch.int32": TensorProto.INT32, "torch.int64": TensorProto.INT64}

    def info(key: str, x: Tensor) -> Any:
        sizes = [f"{key}{axis}" if dynamic else size for axis, size in enumerate(x.shape)]
        return helper.make_tensor_value_info(key, kinds[str(x.dtype)], sizes)

    types = [TensorProto.FLOAT] * 2 + [TensorProto.INT64] * 2 if name == "MergeTokens" else [TensorProto.FLOAT]
    outputs = [helper.make_tensor_value_info(f"out{i}", kind, None) for i, kind in enumerate(types)]
    given = {"given": ",".join(inputs)} | attributes
    node = helper.make_node(name, list(inputs), [output.name for output in outputs], domain=OURS, **given)
    return model_of([node], [info(key, x) for key, x in inputs.items()], outputs)
