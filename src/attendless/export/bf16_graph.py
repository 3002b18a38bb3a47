"""Rewrite an OpenVINO model so that its attention nodes compute in bf16.

`INFERENCE_PRECISION_HINT=bf16` changes the types of OpenVINO's own operators only: around an operator of an extension
the runtime converts to f32 and back. A node whose inputs are bf16 by the model itself is left in bf16.
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
