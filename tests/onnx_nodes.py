"""ONNX graphs of attendless's nodes, for the tests of what reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import native_cases
from attendless.sparse import foveal, native

OURS = "attendless"
DEIT = native_cases.Case(foveal.layout(14, 14, 1, keep=0.1), 2, 3, 64, 64, False, 1.0, 0)


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


def foveal_inputs(batch: int) -> dict[str, Tensor]:
    return {"qkv": torch.randn(batch, 197, 3, 3, 64)}


def any_batch() -> Any:
    """A graph that attends to `foveal_inputs` of any number of images."""
    model = node_model("FovealAttention", foveal_inputs(2), dynamic=False, layout=DEIT.sizes, scale=0.125)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def expected(inputs: dict[str, Tensor]) -> Tensor:
    """What it gives."""
    q, k, v = inputs["qkv"].permute(2, 0, 3, 1, 4)
    return native.functions.foveal_forward(q, k, v, None, None, DEIT.sizes, 0.125).transpose(1, 2)


def thread_seconds() -> dict[str, float]:
    """Seconds of processor each thread of this process has had."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        found[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found
