"""One table describes the kernels' operations: what is derived from it, and what it costs to add to it."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attendless.errors import UserError
from attendless.export import translate
from attendless.sparse import native, ops, table
from attendless.sparse.descriptions import (
    ELEMENTS,
    F32,
    I8,
    Attribute,
    Element,
    Operation,
    Result,
    TensorArg,
    backward,
    fake,
    schema,
)
from attendless.sparse.foveal import Layout
from native_cases import needs_kernels

ROOT = Path(__file__).resolve().parents[1]
#: An element type that no kernel has.
F16 = Element("f16", torch.float16, "Half")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "native" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What is written from the table --------------------------------------------------------------------------------------


def test_the_header_is_what_the_table_says(generate: ModuleType) -> None:
    assert generate.HEADER.read_text() == generate.header(), "run python native/generate.py"


def test_the_docs_are_what_the_table_says(generate: ModuleType) -> None:
    text = generate.DOCS.read_text()
    assert text == generate.docs(text), "run python native/generate.py"


def test_operators_have_the_schema_of_the_table() -> None:
    for op in table.OPERATIONS:
        found = str(getattr(torch.ops.attendless, op.name).default._schema)
        assert found == f"attendless::{schema(op)}"


#: Exported files of earlier versions call these, and hold these nodes.
SCHEMAS = {
    "foveal_forward": "(Tensor q, Tensor k, Tensor v, Tensor? key_bias, Tensor? places, int[] layout, float scale) "
    "-> Tensor",
    "sparsifiner": "(Tensor q, Tensor k, Tensor v, Tensor? key_bias, Tensor coefficients, Tensor basis, "
    "Tensor? tail_scores, Tensor? tail_values, Tensor? share, int budget, int prefix, float tau, int top, float scale) "
    "-> Tensor",
    "block_attend": "(Tensor q, Tensor k, Tensor v, Tensor? key_bias, Tensor[] lists, float scale) -> (Tensor, Tensor)",
    "gather_attend": "(Tensor q, Tensor k, Tensor v, Tensor? key_bias, Tensor indices, Tensor? counts, float scale) "
    "-> (Tensor, Tensor)",
    "merge": "(Tensor x, Tensor keys, Tensor? importance, Tensor? sizes, Tensor? cells, Tensor? owners, int[] plan, "
    "float protect) -> (Tensor, Tensor, Tensor, Tensor)",
}
NODES = {
    "FovealAttention": ("q k v key_bias places", "layout scale"),
    "BlockAttention": ("q k v key_bias query_start queries key_start keys", "scale"),
    "GatherAttention": ("q k v key_bias indices counts", "scale"),
    "SparsifinerAttention": (
        "q k v key_bias coefficients basis tail_scores tail_values share",
        "budget prefix tau top scale",
    ),
    "MergeTokens": ("x keys importance sizes cells owners", "plan protect"),
}


def test_what_files_depend_on_has_not_changed() -> None:
    assert {op.name: schema(op).removeprefix(op.name) for op in table.NODES.values()} == SCHEMAS
    nodes = {}
    for name, op in table.NODES.items():
        attributes = list(translate.node_attributes(op))
        assert attributes[-1] == "given"
        nodes[name] = (" ".join(x.name for x in op.tensors), " ".join(attributes[:-1]))
    assert nodes == NODES


@needs_kernels
def test_the_compiled_module_has_the_signatures_of_the_table(generate: ModuleType) -> None:
    """What was compiled may be older than the header."""

    def text(part: Any) -> str:
        if isinstance(part, Attribute):
            return f"{part.name}, "
        name = f"{part.name}?" if generate.is_optional(part) else part.name
        packed = " packed" if "Storage" not in generate.tensor_type(part) and len(part.elements) == 1 else ""
        return f"{name} [{len(part.axes)}] {' '.join(x.name for x in part.elements)}{packed}, "

    for op, (name, found) in zip(table.OPERATIONS, native.kernels().signatures(), strict=True):
        passed = [x for x in op.flat if isinstance(x, TensorArg) or x in op.attributes]
        assert name == op.name
        assert found == "".join([*map(text, passed), "threads, ", *map(text, op.results)])


# What an addition costs: one table -----------------------------------------------------------------------------------

_X = TensorArg("x", "B H N D", (F32, F16))
HALF = Operation(
    "half",
    "a dummy in a dummy element type",
    (_X, TensorArg("w", "B N", optional=True), Attribute("layout", Layout), Attribute("scale", float)),
    (Result("out", "B H N D", (F32, F16), like="x", tokens_first=True), Result("cells", "B layout.cells", (I8,))),
    lambda x, *_: 7 * x[0],
    node="HalfAttention",
)
LAYOUT = [4, 4, 1, 2, 2, 0, 2, 1]


def test_a_new_operation_and_element_type_need_no_more_than_their_description(generate: ModuleType) -> None:
    assert schema(HALF) == "half(Tensor x, Tensor? w, int[] layout, float scale) -> (Tensor, Tensor)"
    assert translate.node_attributes(HALF) == {"layout": "INTS", "scale": "FLOAT", "given": "STRING"}
    text = generate.header([HALF], [*ELEMENTS, F16])
    assert "OneOf<4, Element::f32, Element::f16> x;" in text
    assert "kElement<Half> == Element::f16" in text
    assert 'on.result("cells", cells, [&] { return Shape<2>{x.shape(0), size_t(Layout(layout).cells())}; });' in text
    assert "`x` [B, H, N, D] f32/f16" in generate.docs_table([HALF])


def test_a_new_operation_is_traced_and_counted() -> None:
    library = torch.library.Library("attendless_test", "FRAGMENT")
    ops.register(library, HALF, fake(HALF))
    x = torch.ones(2, 3, 17, 8, dtype=torch.float16)
    with FakeTensorMode() as mode:
        out, cells = torch.ops.attendless_test.half(mode.from_tensor(x), None, LAYOUT, 1.0)
    assert (out.dtype, out.shape, out.transpose(1, 2).is_contiguous()) == (torch.float16, x.shape, True)
    assert (cells.dtype, cells.shape) == (torch.int8, (2, 4))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        torch.ops.attendless_test.half(x, None, LAYOUT, 1.0)
    assert counter.get_total_flops() == 14


def test_a_new_element_type_reaches_the_kernel_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that is made of a description: what the table lists is passed on, other types are converted."""
    seen: list[Any] = []

    class Kernels:
        @staticmethod
        def half(*arguments: Any) -> None:
            seen[:] = [torch.from_dlpack(x) if "capsule" in repr(x) else x for x in arguments]

    monkeypatch.setattr(native, "kernels", lambda: Kernels)
    run = native.function(HALF)
    for dtype, read in ((torch.float16, torch.float16), (torch.float64, torch.float32)):
        out, cells = run(torch.ones(2, 3, 17, 8, dtype=dtype), None, LAYOUT, 0.5)
        x, w, layout, scale, threads, made, _ = seen
        assert (x.dtype, w, layout, scale, threads) == (read, None, LAYOUT, 0.5, torch.get_num_threads())
        assert (made.dtype, out.dtype, cells.dtype) == (read, dtype, torch.int8)


# What a description refuses ------------------------------------------------------------------------------------------


@needs_kernels
def test_int8_is_refused_until_a_kernel_reads_it() -> None:
    q, low = torch.zeros(1, 1, 17, 8), torch.zeros(1, 1, 17, 8, dtype=torch.int8)
    with pytest.raises(
        UserError, match=r"foveal: q must be a tensor of torch\.float32 or torch\.bfloat16, got torch\.int8"
    ):
        torch.ops.attendless.foveal(low, q, q, None, None, LAYOUT, 1.0)
    with pytest.raises(ValueError, match="q cannot be i8: the kernel takes f32 or bf16"):
        native.kernels().foveal_forward(*map(torch.utils.dlpack.to_dlpack, (low, q, q)))


@needs_kernels
def test_messages_name_the_argument() -> None:
    q, run = torch.zeros(1, 1, 17, 8), torch.ops.attendless
    with pytest.raises(UserError, match=r"foveal: k must be \[B, H, N, D\], got \[1, 17, 8\]"):
        run.foveal(q, q[0], q, None, None, LAYOUT, 1.0)
    with pytest.raises(UserError, match=r"layout must be 9 integers from 0 to 16777216 \(height, .* int8\), got \[4"):
        run.foveal(q, q, q, None, None, LAYOUT[:6], 1.0)
    with pytest.raises(UserError, match="every side must be at least 1"):
        run.foveal(q, q, q, None, None, [4, 4, 1, 2, 0, 0, 2, 1], 1.0)
    with pytest.raises(UserError, match="block_attend: lists must be 4 tensors, query_start, queries, key_start, keys"):
        run.block_attend(q, q, q, None, [torch.arange(3)] * 3, 1.0)


def test_a_result_with_an_unknown_axis_is_refused() -> None:
    wrong = dataclasses.replace(HALF, results=(Result("out", "B Z"),))
    with pytest.raises(ValueError, match="half: no argument has an axis 'Z'"):
        fake(wrong)


def test_backward_takes_what_forward_takes_and_makes() -> None:
    derived = backward(table.gather_attend, "gather_backward", lambda *_: 0)
    names = [argument.name for argument in derived.arguments]
    assert names == [
        *("out_grad", "q", "k", "v", "out", "lse", "key_bias", "indices", "counts", "scale", "bias_grad")
    ]  # fmt: skip
    assert all(tensor.elements == (F32,) for tensor in derived.tensors if tensor.name in "qkv")
