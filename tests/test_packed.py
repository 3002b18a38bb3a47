"""Graphs whose attention reads a packed projection: rewritten where they compute just that, left alone elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attendless.export import extension
from attendless.export.fuse_qkv import pack
from attendless.export.openvino_core import core_with_kernels
from onnx_nodes import OURS, model_of

onnx = pytest.importorskip("onnx")
LAYOUT = [4, 4, 1, 2, 2, 0, 2, 1]


def layer(
    *,
    split: str = "slice",
    parts: str = "qkv",
    perm: tuple[int, ...] = (2, 0, 3, 1, 4),
    back: bool = True,
    bias: bool = False,
) -> Any:
    """qkv [B, 17, 3, 2, 8] → q, k, v → foveal attention and merging → what they give."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("Transpose", ["qkv"], ["turned"], perm=list(perm))]
    numbers = {f"n{i}": np.array([i], dtype=np.int64) for i in range(4)} | {f"s{i}": np.array(i) for i in range(3)}
    for i, name in enumerate("qkv"):
        if split == "slice":
            nodes.append(helper.make_node("Slice", ["turned", f"n{i}", f"n{i + 1}", "n0"], [f"{name}1"]))
            nodes.append(helper.make_node("Squeeze", [f"{name}1", "n0"], [name + "_"]))
        else:
            nodes.append(helper.make_node("Gather", ["turned", f"s{i}"], [name + "_"], axis=0))
    heads = [f"{name}_" for name in parts]
    more = ["key_bias"] if bias else []
    given = ",".join(["q", "k", "v", *more])
    attributes = {"layout": LAYOUT, "scale": 0.3, "given": given}
    nodes.append(helper.make_node("FovealAttention", [*heads, *more], ["seen"], domain=OURS, **attributes))
    nodes.append(helper.make_node("Transpose", ["seen"], ["out"], perm=[0, 2, 1, 3] if back else [0, 1, 3, 2]))
    merged = ["x_out", "sizes", "cells", "owners"]
    plan = {"plan": [4, 4, 1, 16, 4, 0], "protect": 0.0, "given": "x,keys"}
    nodes.append(helper.make_node("MergeTokens", ["x", heads[1]], merged, domain=OURS, **plan))
    inputs = [
        helper.make_tensor_value_info("qkv", TensorProto.FLOAT, ["B", 17, 3, 2, 8]),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 17, 5]),
        *([helper.make_tensor_value_info("key_bias", TensorProto.FLOAT, ["B", 17])] if bias else []),
    ]
    shapes = {"out": ["B", 17, 2, 8], "x_out": ["B", 13, 5]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    return model_of(nodes, inputs, outputs, [numpy_helper.from_array(x, name) for name, x in numbers.items()])


def kinds(model: Any) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


def results(model: Any) -> list[np.ndarray]:
    pytest.importorskip("openvino")
    if reason := extension.available():
        pytest.skip(reason)
    core = core_with_kernels()
    random = torch.Generator().manual_seed(0)
    shapes = [[2 if d.dim_param else d.dim_value for d in x.type.tensor_type.shape.dim] for x in model.graph.input]
    infer = core.compile_model(core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = infer([torch.randn(shape, generator=random).numpy() for shape in shapes])
    return [np.array(found[i]) for i in range(2)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("split", ["slice", "gather"])
def test_packs_and_computes_the_same(split: str, bias: bool) -> None:
    model = layer(split=split, bias=bias)
    before = results(model)
    assert pack(model) == 2
    assert kinds(model) == ["FovealAttention", "MergeTokens"]
    onnx.checker.check_model(model)
    for ours, wanted in zip(results(model), before, strict=True):
        assert np.array_equal(ours, wanted)
    assert pack(model) == 0


@pytest.mark.parametrize(
    ("other", "packed"),
    [
        ({"parts": "qvk"}, 0),  # v where k belongs, and a merge by v
        ({"perm": (2, 0, 1, 3, 4)}, 0),
        ({"back": False}, 1),  # the merge
    ],
)
def test_leaves_alone_what_computes_something_else(other: dict, packed: int) -> None:
    model = layer(**other)
    attention = next(node for node in model.graph.node if node.op_type == "FovealAttention")
    inputs = list(attention.input)
    assert pack(model) == packed
    assert list(attention.input) == inputs
