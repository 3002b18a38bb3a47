"""int8 for OpenVINO: NNCF quantises a file by calibration, and some layers are quantised at run time instead.

Static: the activations of a MatMul or Convolution pass a FakeQuantize node, whose range comes from calibration images.
Dynamic: the weights of a MatMul are int8 with a scale for each output channel. OpenVINO then quantises the activations
    at run time, with a scale for each group of `GROUP` channels of a token. CPUs without VNNI compute in fp32 or bf16.

Layers that read an activation function are dynamic from the start. `make_dynamic` makes other layers dynamic without
another calibration. `quantise_like` quantises a file with the same layers, such as the model with merged tokens, with
the ranges of the first.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..measure.precision import saturates
from .int8_settings import Calibration, Int8
from .openvino import Run, opened, read_with_kernels
from .openvino_core import signal_stack_kept
from .packages import need

_PRODUCTS = ("MatMul", "Convolution")
#: Activation functions, as OpenVINO names them.
_FUNCTIONS = ("Gelu", "Relu", "Swish", "HSwish", "Mish")
#: How NNCF names the nodes that scale activations before quantisation.
_SMOOTHED = "/nncf_smooth_quant"


def quantise(path: Path, batches: Calibration, how: Int8) -> None:
    """Quantise a file in its place."""
    nncf = need("openvino", "nncf", "openvino")
    model = read_with_kernels(path)
    nncf.set_log_level(logging.ERROR)
    others = sorted({node.get_type_name() for node in model.get_ops()} - {*_PRODUCTS, "Constant"})
    # Products of two activations are the attention's, those with a constant the layers'.
    inner = [node.get_friendly_name() for node in model.get_ops() if _of_activations(node)]
    with signal_stack_kept():
        quantised = nncf.quantize(
            model,
            nncf.Dataset(batches, lambda batch: batch),
            preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(batches),
            ignored_scope=nncf.IgnoredScope(names=inner, types=others, validate=False),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=how.smooth),
                overflow_fix=nncf.OverflowFix.ENABLE if saturates() else nncf.OverflowFix.DISABLE,
            ),
        )
    if how.dynamic:
        _dynamic(quantised, model, {layer_name(node) for node in model.get_ops() if _reads_function(node)})
    _replace(path, quantised)


def quantise_like(path: Path, quantised: Path, original: Path) -> bool:
    """Quantise a file in its place with the ranges, weights and biases of another file, without a calibration.

    Args:
        path: a file in floating point, with the layers of `original` in another graph.
        quantised, original: a file after and before quantisation.

    Returns:
        Whether each layer of the file is one of `original`, by its weights; if not, the file stays as it is.
    """
    model, theirs = read_with_kernels(path), read_with_kernels(quantised)
    named = {layer_name(node): node for node in theirs.get_ops() if node.get_type_name() in _PRODUCTS}
    known = {
        _weights(node): named.get(layer_name(node)) for node in read_with_kernels(original).get_ops() if _is_layer(node)
    }
    layers = [node for node in model.get_ordered_ops() if _is_layer(node)]
    found: list[Any] = [known.get(_weights(node)) for node in layers]
    if not layers or not all(map(_same_rank, layers, found)):
        return False
    made: dict[Any, Any] = {}
    for node, other in zip(layers, found, strict=True):
        if _is_static(other):
            source = node.input_value(0)
            key = (source.get_node().get_friendly_name(), source.get_index(), _range_name(other))
            if key not in made:  # layers that read the same values share one range
                made[key] = _rounded(source, other.input_value(0))
            node.input(0).replace_source_output(made[key])
        node.input(1).replace_source_output(_copied(other.input_value(1)))
        _put_bias(node, other)
    _replace(path, model)
    return True


def _is_layer(node: Any) -> bool:
    """Whether a node multiplies activations by weights."""
    return node.get_type_name() in _PRODUCTS and node.input_value(1).get_node().get_type_name() == "Constant"


def _weights(node: Any) -> bytes:
    """A digest of a layer's weights, which tells it apart in graphs with other names."""
    data = node.input_value(1).get_node().get_data()
    return hashlib.blake2b(data.tobytes() + str(data.shape).encode(), digest_size=16).digest()


def _same_rank(node: Any, other: Any | None) -> bool:
    """Whether there is another layer whose constants fit the activations of a layer."""
    return other is not None and len(node.get_output_shape(0)) == len(other.get_output_shape(0))


def _range_name(node: Any) -> str:
    return str(node.input_value(0).get_node().get_friendly_name())


def _rounded(source: Any, theirs: Any) -> Any:
    """`source`, scaled and rounded to 8 bits by copies of the nodes that end in `theirs`, a value of another model."""
    opset, node = need("openvino", "openvino").opset13, theirs.get_node()
    name, inputs = node.get_friendly_name(), [node.input_value(i) for i in range(node.get_input_size())]
    if name.endswith(_SMOOTHED):
        made = opset.multiply(_rounded(source, inputs[0]), _copied(inputs[1]))
    elif node.get_type_name() == "FakeQuantize":
        levels = node.get_attributes()["levels"]
        made = opset.fake_quantize(_rounded(source, inputs[0]), *map(_copied, inputs[1:]), levels)
    else:
        return source
    made.set_friendly_name(name)
    return made.output(0)


def layer_macs(path: Path) -> dict[str, int]:
    """The multiply-accumulates of each layer of a file that is quantised by calibration, in order of execution."""
    found = {}
    for node in read_with_kernels(path).get_ordered_ops():
        if _is_static(node):
            outputs, weights = list(node.get_output_shape(0)), list(node.get_input_shape(1))
            channels = outputs[1 if node.get_type_name() == "Convolution" else -1]
            found[layer_name(node)] = math.prod(outputs) * math.prod(weights) // channels
    return found


def open_dynamic(path: Path, original: Path, names: Iterable[str], floats: str = "fp32") -> Run:
    """A quantised file with some more layers dynamic; no file is written."""
    model = read_with_kernels(path)
    _dynamic(model, read_with_kernels(original), set(names))
    return opened(model, floats=floats)


def make_dynamic(path: Path, original: Path, names: Iterable[str]) -> None:
    """Make layers of a quantised file dynamic, in its place. `original` is the file before quantisation."""
    model = read_with_kernels(path)
    _dynamic(model, read_with_kernels(original), set(names))
    _replace(path, model)


def _dynamic(model: Any, original: Any, names: set[str]) -> None:
    """Make layers of a quantised model dynamic, with the weights and biases of the original model.

    A convolution returns to floating point.
    """
    known = {layer_name(node): node for node in original.get_ops() if _is_layer(node) and layer_name(node) in names}
    for node in model.get_ordered_ops():
        if not _is_static(node) or layer_name(node) not in known:
            continue
        before = known[layer_name(node)]
        source = node.input_value(0).get_node().input_value(0)
        while source.get_node().get_friendly_name().endswith(_SMOOTHED):
            source = source.get_node().input_value(0)
        node.input(0).replace_source_output(source)
        node.input(1).replace_source_output(_int8_weights(before.input_value(1).get_node(), node))
        _put_bias(node, before)  # the quantiser corrects biases for the error of the layer


def _int8_weights(constant: Any, node: Any) -> Any:
    """Weights as int8 times a scale for each output channel, if OpenVINO quantises the inputs of a node at run time;
    otherwise the weights as they are."""
    opset, weights = need("openvino", "openvino").opset13, constant.get_data()
    if node.get_type_name() != "MatMul":
        return opset.constant(weights).output(0)
    inputs = -1 if node.get_attributes()["transpose_b"] else -2
    scale = np.maximum(np.abs(weights).max(axis=inputs, keepdims=True), 1e-12) / 127
    low = opset.convert(opset.constant(np.rint(weights / scale).astype(np.int8)), "f32")
    return opset.multiply(low, opset.constant(scale.astype(np.float32))).output(0)


def _reads_function(node: Any) -> bool:
    """Whether a node multiplies the outputs of an activation function by weights."""
    read = node.input_value(0).get_node().get_type_name() if node.get_type_name() == "MatMul" else ""
    return read in _FUNCTIONS and _is_layer(node)


def _put_bias(node: Any, other: Any) -> None:
    """Give a layer the bias of another one, if a constant is added to the outputs of both."""
    (added, *more), (theirs, *_) = (list(one.output(0).get_target_inputs()) for one in (node, other))
    added, theirs = added.get_node(), theirs.get_node()
    if more or {added.get_type_name(), theirs.get_type_name()} != {"Add"}:
        return
    for i in range(2):
        if _constant(added.input_value(i).get_node()) and _constant(theirs.input_value(i).get_node()):
            added.input(i).replace_source_output(_copied(theirs.input_value(i)))


def _copied(value: Any) -> Any:
    """A constant of another model, or what is computed of constants alone, as one of this model."""
    opset, node = need("openvino", "openvino").opset13, value.get_node()
    inputs = [_copied(node.input_value(i)) for i in range(node.get_input_size())]
    match node.get_type_name():
        case "Constant":
            return opset.constant(node.get_data()).output(0)
        case "Convert":
            return opset.convert(*inputs, value.get_element_type().get_type_name()).output(0)
        case "Multiply":
            return opset.multiply(*inputs).output(0)
        case "Subtract":
            return opset.subtract(*inputs).output(0)
    return value


def layer_name(node: Any) -> str:
    """The name of a layer's PyTorch module. OpenVINO adds a suffix to products that it separates from their bias."""
    return str(node.get_friendly_name()).removesuffix("/WithoutBiases")


def _is_static(node: Any) -> bool:
    """Whether the activations of a node are quantised by calibration."""
    kind = node.get_type_name()
    return kind in _PRODUCTS and node.input_value(0).get_node().get_type_name() == "FakeQuantize"


def _replace(path: Path, model: Any) -> None:
    """Write a model in place of the file that it was read from."""
    again = path.with_name(f"int8-{path.name}")
    need("openvino", "openvino").save_model(model, again, compress_to_fp16=False)
    again.replace(path)
    again.with_suffix(".bin").replace(path.with_suffix(".bin"))


def _of_activations(node: Any) -> bool:
    if node.get_type_name() != "MatMul":
        return False
    return not any(_constant(node.input_value(i).get_node()) for i in range(2))


def _constant(node: Any) -> bool:
    """Whether a value is known beforehand: a constant, or made of constants alone."""
    inputs = [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return node.get_type_name() == "Constant" or (bool(inputs) and all(map(_constant, inputs)))
