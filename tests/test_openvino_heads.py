"""Attention with as many queries as heads in OpenVINO: wrong in bf16 there, unless it is written with one head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attendless.export.bf16_graph import merge_heads
from attendless.measure.precision import no_bf16

openvino = pytest.importorskip("openvino")
HEADS, KEYS, WIDTH = 4, 16, 32


def model(queries: int, batch: int = 3, masked: bool = False) -> Any:
    """Attention of [B, tokens, heads · width] between linear layers."""
    from openvino import opset13 as op

    def heads(count: int) -> tuple[Any, Any]:
        given = op.parameter([batch, count, HEADS * WIDTH], np.float32)
        split = op.reshape(op.matmul(given, identity, False, False), [0, count, HEADS, WIDTH], True)
        return given, op.transpose(split, [0, 2, 1, 3])

    identity = op.constant(np.eye(HEADS * WIDTH, dtype=np.float32))
    (a, q), (b, k), (c, v) = heads(queries), heads(KEYS), heads(KEYS)
    mask = np.zeros((1, HEADS, queries, KEYS) if masked else (), np.float32)
    found = op.scaled_dot_product_attention(q, k, v, op.constant(mask), op.constant(np.float32(WIDTH**-0.5)))
    joined = op.reshape(op.transpose(found, [0, 2, 1, 3]), [0, queries, HEADS * WIDTH], True)
    return openvino.Model([op.result(op.matmul(joined, identity, False, False))], [a, b, c])


def outputs(graph: Any, precision: str, batch: int = 3) -> np.ndarray:
    draws = np.random.default_rng(0)
    counts = [one.partial_shape[1].get_length() for one in graph.inputs]
    given = {i: draws.standard_normal([batch, n, HEADS * WIDTH], np.float32) for i, n in enumerate(counts)}
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    return np.array(compiled(given)[0], np.float32)


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_heads_are_merged_where_they_equal_the_queries() -> None:
    expected, graph = outputs(model(HEADS), "f32"), model(HEADS)
    assert merge_heads(graph) == 1
    assert distance(outputs(graph, "f32"), expected) < 1e-6
    assert merge_heads(graph) == 0, "a second call changes nothing"
    assert list(graph.output(0).shape) == [3, HEADS, HEADS * WIDTH]


@pytest.mark.skipif(bool(no_bf16()), reason="this CPU has no bf16 instructions")
@pytest.mark.parametrize("queries", [HEADS - 1, HEADS, HEADS + 1])
def test_bf16_differs_by_rounding(queries: int) -> None:
    expected, graph = outputs(model(queries), "f32"), model(queries)
    merge_heads(graph)
    assert distance(outputs(graph, "bf16"), expected) < 0.01


@pytest.mark.parametrize(("queries", "masked"), [(HEADS + 1, False), (HEADS, True)])
def test_other_attention_stays(queries: int, masked: bool) -> None:
    assert merge_heads(model(queries, masked=masked)) == 0


def test_any_batch_stays_any() -> None:
    graph = model(HEADS, batch=-1)
    assert merge_heads(graph) == 1
    assert graph.output(0).partial_shape[0].is_dynamic
    assert outputs(graph, "f32", batch=2).shape == (2, HEADS, HEADS * WIDTH)
