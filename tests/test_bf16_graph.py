"""Attention nodes in bf16: in OpenVINO, whose models are rewritten, and in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attendless.export import bf16_graph, extension, onnx
from attendless.export.openvino_core import core_with_kernels
from bf16_cases import same_rounding
from onnx_nodes import DEIT, any_batch, foveal_inputs, node_model

openvino = pytest.importorskip("openvino")
pytest.importorskip("onnx")


def in_bf16(inputs: dict[str, Tensor]) -> Tensor:
    q, k, v = inputs["qkv"].bfloat16().permute(2, 0, 3, 1, 4)
    out: Tensor = torch.ops.attendless.foveal_forward(q, k, v, None, None, list(DEIT.sizes), 0.125)
    return out.transpose(1, 2)


@pytest.fixture(scope="module", name="core")
def with_the_operators() -> Any:
    if reason := extension.available():
        pytest.skip(reason)
    return core_with_kernels()


def test_openvino_keeps_the_type_of_the_queries(core: Any) -> None:
    model = core.read_model(any_batch().SerializeToString())
    assert bf16_graph.halve(model) == 1
    (node,) = [node for node in model.get_ops() if node.get_type_name() == "FovealAttention"]
    assert node.get_input_element_type(0) == node.get_output_element_type(0) == openvino.Type.bf16
    assert model.outputs[0].get_element_type() == openvino.Type.f32


def test_openvino_evaluates_the_operator_in_bf16(core: Any) -> None:
    """By OpenVINO's reference, which converts nothing: a CPU without bf16 would compute in f32."""
    model = core.read_model(any_batch().SerializeToString())
    bf16_graph.halve(model)
    (node,) = [node for node in model.get_ops() if node.get_type_name() == "FovealAttention"]
    inputs = foveal_inputs(2)
    given = openvino.Tensor(
        inputs["qkv"].bfloat16().view(torch.int16).numpy().view(np.uint16), [2, 197, 3, 3, 64], openvino.Type.bf16
    )
    out = openvino.Tensor(openvino.Type.bf16, [2, 197, 3, 64])
    assert node.evaluate([out], [given])
    found = torch.from_numpy(np.array(out.data).view(np.int16)).view(torch.bfloat16)
    same_rounding(found, in_bf16(inputs))


def test_a_rewritten_model_runs_on_this_cpu(core: Any) -> None:
    model = core.read_model(any_batch().SerializeToString())
    bf16_graph.halve(model)
    infer = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    inputs = foveal_inputs(2)
    found = torch.from_numpy(infer([inputs["qkv"].numpy()])[0])
    # Without bf16 instructions OpenVINO computes in f32, of inputs that are not rounded: near-ties choose other cells.
    apart = (found - in_bf16(inputs).float()).abs()
    assert float((apart > 0.03).float().mean()) < 0.01


def test_onnx_runtime_reads_bf16_and_writes_f32() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from onnx import TensorProto

    if reason := onnx.kernels_unavailable():
        pytest.skip(reason)
    inputs = foveal_inputs(2)
    model = node_model("FovealAttention", inputs, dynamic=False, layout=DEIT.sizes, scale=0.125)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnx.library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bits = inputs["qkv"].bfloat16().view(torch.int16).numpy().view(np.uint16)
    given = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    (found,) = session.run_with_ort_values(None, {"qkv": given})
    same_rounding(torch.from_numpy(found.numpy()).bfloat16(), in_bf16(inputs))


@pytest.mark.parametrize("wrong", [{"scale": 2}, {"scale": "1"}, {"order": 1}])
def test_onnx_runtime_refuses_attributes_of_another_type(wrong: dict[str, Any]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if reason := onnx.kernels_unavailable():
        pytest.skip(reason)
    attributes = {"layout": DEIT.sizes, "scale": 0.125} | wrong
    model = node_model("FovealAttention", foveal_inputs(1), dynamic=False, **attributes)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnx.library()))
    (name,) = wrong
    with pytest.raises(Exception, match=f"the attribute '{name}' must be"):
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
