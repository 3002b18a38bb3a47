"""Rewrite an ONNX graph so that its attention nodes read the output of a layer's qkv projection without transposition.

    qkv [B, N, 3, H, D] → Transpose → q, k, v [B, H, N, D] → FovealAttention → Transpose → [B, N, H, D]

becomes `FovealAttention(qkv)`, with `qkv` in its `given` for `q,k,v`. The keys of MergeTokens become `qkv` likewise.
Nodes whose q, k or v are computed otherwise (normalised, rotary positions) are left unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..sparse.descriptions import Operation
from ..sparse.table import NODES


def _parts(op: Operation) -> dict[str, int]:
    """The inputs of a node that may come from a packed qkv tensor, and which part of it each is."""
    return {tensor.name: tensor.part for tensor in op.tensors if tensor.part is not None}


#: Nodes that take queries, keys and values; others take keys alone.
_ATTENTIONS = tuple(name for name, op in NODES.items() if len(_parts(op)) == 3)
_KEYED = tuple(name for name, op in NODES.items() if list(_parts(op)) == ["keys"])


def pack(model: Any) -> int:
    """Rewrite an `onnx.ModelProto` in place; return the number of changed nodes."""
    graph = _Graph(model.graph)
    changed = sum(_pack_attention(graph, node) for node in graph.of(*_ATTENTIONS))
    changed += sum(_pack_keys(graph, node) for node in graph.of(*_KEYED))
    graph.drop_unread()
    return changed


def _pack_attention(graph: _Graph, node: Any) -> bool:
    given = _given(node)
    if given[:3] != ["q", "k", "v"]:
        return False
    parts = [graph.part(name) for name in node.input[:3]]
    sources: Any = {part and part[0] for part in parts}
    readers = graph.readers(node.output[0])
    turned = len(readers) == 1 and _perm(readers[0]) == [0, 2, 1, 3]
    if len(sources) != 1 or None in sources or [part and part[1] for part in parts] != [0, 1, 2] or not turned:
        return False
    _replace(node, [*sources, *node.input[3:]], ["qkv", *given[3:]])
    node.output[0] = readers[0].output[0]
    graph.remove(readers[0])
    return True


def _pack_keys(graph: _Graph, node: Any) -> bool:
    given = _given(node)
    if "keys" not in given:
        return False
    at = given.index("keys")
    part = graph.part(node.input[at])
    if part is None or part[1] != 1:
        return False
    inputs = [*node.input]
    inputs[at], given[at] = part[0], "qkv"
    _replace(node, inputs, given)
    return True


class _Graph:
    """The node that computes each value, and the nodes that read it."""

    def __init__(self, graph: Any) -> None:
        from onnx import numpy_helper

        self.graph, self.array = graph, numpy_helper.to_array
        self.maker = {output: node for node in graph.node for output in node.output}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}

    def of(self, *types: str) -> list[Any]:
        return [node for node in self.graph.node if node.op_type in types and node.domain == "attendless"]

    def readers(self, value: str) -> list[Any]:
        """The nodes that read a value; empty for outputs of the graph, whose readers are unknown."""
        if any(value == output.name for output in self.graph.output):
            return []
        return [node for node in self.graph.node if value in node.input]

    def remove(self, node: Any) -> None:
        self.graph.node.remove(node)

    def drop_unread(self) -> None:
        """Remove nodes whose outputs are not read, and the type information of removed values."""
        while True:
            read = {name for node in self.graph.node for name in node.input} | {x.name for x in self.graph.output}
            unread = [node for node in self.graph.node if not read.intersection(node.output)]
            if not unread:
                break
            for node in unread:
                self.remove(node)
        made = {name for node in self.graph.node for name in node.output}
        kept = [info for info in self.graph.value_info if info.name in made]
        # The result of an attention now has the transposed shape, which its new name already states.
        del self.graph.value_info[:]
        self.graph.value_info.extend(kept)

    def part(self, value: str) -> tuple[str, int] | None:
        """If a value is q, k or v of a packed tensor: that tensor, and 0, 1 or 2."""
        node = self.maker.get(value)
        if node is not None and node.op_type == "Gather" and _attribute(node, "axis", 0) == 0:
            index = self.constant(node.input[1])
            which, source = (None if index is None or index.ndim else [int(index)]), node.input[0]
        elif node is not None and node.op_type == "Squeeze" and self.numbers(node, 1) == [0]:
            node = self.maker.get(node.input[0])
            if node is None or node.op_type != "Slice" or self.numbers(node, 3) != [0] or len(node.input) > 4:
                return None
            first, last = self.numbers(node, 1), self.numbers(node, 2)
            which, source = (first if first and last == [first[0] + 1] else None), node.input[0]
        else:
            return None
        turned = self.maker.get(source)
        if which is None or turned is None or _perm(turned) != [2, 0, 3, 1, 4]:
            return None
        return turned.input[0], which[0]

    def numbers(self, node: Any, at: int) -> list[int] | None:
        found = self.constant(node.input[at]) if len(node.input) > at else None
        return None if found is None else [int(x) for x in np.ravel(found)]

    def constant(self, value: str) -> np.ndarray | None:
        if value in self.constants:
            return self.array(self.constants[value])
        node = self.maker.get(value)
        if node is None or node.op_type != "Constant":
            return None
        (only,) = node.attribute
        return self.array(only.t) if only.name == "value" else np.asarray(only.i or list(only.ints))


def _attribute(node: Any, name: str, default: Any) -> Any:
    from onnx import helper

    found = [helper.get_attribute_value(attribute) for attribute in node.attribute if attribute.name == name]
    return found[0] if found else default


def _perm(node: Any) -> list[int]:
    return list(_attribute(node, "perm", [])) if node.op_type == "Transpose" else []


def _given(node: Any) -> list[str]:
    return str(_attribute(node, "given", b"").decode()).split(",")


def _replace(node: Any, inputs: list[str], given: list[str]) -> None:
    del node.input[:]
    node.input.extend(inputs)
    for attribute in node.attribute:
        if attribute.name == "given":
            attribute.s = ",".join(given).encode()
