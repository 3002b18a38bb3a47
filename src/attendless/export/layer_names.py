"""Names of layers in a graph: each convolution and matrix product with weights gets the name of its PyTorch module.

The names survive the conversion to OpenVINO: a quantiser can leave out layers by name, and profiles are readable.
"""

from __future__ import annotations

import ast
from typing import Any

#: Where the exporter of PyTorch notes the modules around a node, the innermost before the node's own name.
_SCOPES = "pkg.torch.onnx.name_scopes"
_WEIGHTED = ("MatMul", "Gemm", "Conv")


def name_layers(model: Any) -> None:
    """Name the nodes of an `onnx.ModelProto` in place. A module that computes several products names the first."""
    constants = {tensor.name for tensor in model.graph.initializer}
    taken = {node.name for node in model.graph.node}
    for node in model.graph.node:
        if node.op_type not in _WEIGHTED or not constants & set(node.input):
            continue
        name = _module(node)
        if name and name not in taken:
            taken.add(name)
            node.name = name


def _module(node: Any) -> str:
    """The module that a node belongs to, without the wrapper `model`; empty if it is not known."""
    told = [prop.value for prop in node.metadata_props if prop.key == _SCOPES]
    try:
        scopes = ast.literal_eval(told[0]) if told else []
        return str(scopes[-2]).removeprefix("model.")
    except (ValueError, SyntaxError, IndexError):
        return ""
