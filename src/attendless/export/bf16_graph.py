"""Rewrite an OpenVINO model so that its attention computes in bf16, and computes the right thing.

`INFERENCE_PRECISION_HINT=bf16` changes the types of OpenVINO's own operators only: around an operator of an extension
the runtime converts to f32 and back. A node whose inputs are bf16 by the model itself is left in bf16.

OpenVINO's own `ScaledDotProductAttention` is wrong in bf16 where an image has as many queries as heads (2026.4.1, CPU:
the outputs differ by half of their norm; with one query more or fewer they differ by rounding). SAM 2's Hiera has four
of each in the block between its second and third stage. `merge_heads` writes such a node with one head.
"""

from __future__ import annotations

from typing import Any

from ..sparse.descriptions import BF16
from ..sparse.table import NODES
from .translate import DOMAIN

#: The inputs of each attention node that may be bf16, by the names in its `given`.
_HALVES = {
    name: {*(tensor.name for tensor in op.tensors if BF16 in tensor.elements), "qkv"}
    for name, op in NODES.items()
    if BF16 in op.returned[0].elements
}


def halve(model: Any) -> int:
    """Convert the queries, keys and values of each attention node to bf16 and its result to f32, in place; how many
    nodes changed."""
    from openvino import opset13

    changed = 0
    for node in model.get_ops():
        kind = node.get_type_info()
        if kind.version_id != DOMAIN or kind.name not in _HALVES:
            continue
        if node.get_output_element_type(0).get_type_name() == "bf16":
            continue  # by an earlier call
        names = node.get_attributes()["given"].split(",")
        for at, name in enumerate(names):
            if name in _HALVES[kind.name]:
                source = node.input(at).get_source_output()
                node.input(at).replace_source_output(opset13.convert(source, "bf16").output(0))
        readers = node.output(0).get_target_inputs()
        wide = opset13.convert(node.output(0), "f32")
        for reader in readers:
            reader.replace_source_output(wide.output(0))
        changed += 1
    if changed:
        model.validate_nodes_and_infer_types()
    return changed


def merge_heads(model: Any) -> int:
    """Compute each attention with as many queries as heads, [B, H, H, D], as [B · H, 1, H, D], in place; how many nodes
    changed. Nodes with a mask for each head or image stay as they are."""
    from openvino import opset13

    def shaped(value: Any, shape: list[int]) -> Any:
        return opset13.reshape(value, opset13.constant(shape, dtype="int64"), special_zero=False).output(0)

    changed = 0
    for node in model.get_ops():
        if node.get_type_name() != "ScaledDotProductAttention":
            continue
        shapes = [node.input_value(i).get_partial_shape() for i in range(3)]
        masked = node.get_input_size() > 3 and node.input_value(3).get_partial_shape().rank.get_length() > 2
        if masked or any(shape.rank.is_dynamic or len(shape) != 4 for shape in shapes):
            continue
        if any(shape[axis].is_dynamic for shape in shapes for axis in (1, 2, 3)):
            continue
        sizes = [[shape[axis].get_length() for axis in (1, 2, 3)] for shape in shapes]
        heads, queries, _ = sizes[0]
        if not heads == queries > 1 or any(size[0] != heads for size in sizes):
            continue
        width = sizes[2][2]
        readers = node.output(0).get_target_inputs()
        for at, (_, count, size) in enumerate(sizes):
            node.input(at).replace_source_output(shaped(node.input_value(at), [-1, 1, count, size]))
        back = shaped(node.output(0), [-1, heads, queries, width])
        for reader in readers:
            reader.replace_source_output(back)
        changed += 1
    if changed:
        model.validate_nodes_and_infer_types()
    return changed
