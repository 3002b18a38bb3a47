"""The kernels as operators of other runtimes: each against its definition, and what must not break them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import native_cases
import test_native_block
import test_native_merge
import test_native_sparsifiner
from attendless.export import extension, onnx
from attendless.export.openvino_core import core_with_kernels
from attendless.sparse import blocks, foveal, gather, native
from attendless.sparse.merging import Merged
from native_cases import close
from onnx_nodes import DEIT, node_model

pytest.importorskip("onnx")
#: Each is compiled by its runtime, which takes longer than to compute it.
sweep = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: How q, k and v come, and whether their sizes are known when the model is compiled.
ways = st.tuples(st.sampled_from(["BHND", "BNHD", "qkv"]), st.booleans())


class OpenVino:
    def __init__(self) -> None:
        pytest.importorskip("openvino")
        if reason := extension.available():
            pytest.skip(reason)
        self.core = core_with_kernels()

    def compiled(self, model: Any, threads: int = 1) -> Any:
        hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        return self.core.compile_model(model, "CPU", hints)

    def run(self, model: bytes, inputs: list[np.ndarray], threads: int) -> list[np.ndarray]:
        request = self.compiled(self.core.read_model(model), threads).create_infer_request()
        request.start_async(inputs)  # infer() would not tell what goes wrong on one thread
        request.wait()
        return [np.array(output.data) for output in request.output_tensors]


class OnnxRuntime:
    def __init__(self) -> None:
        self.onnxruntime = pytest.importorskip("onnxruntime")
        if reason := onnx.kernels_unavailable():
            pytest.skip(reason)

    def compiled(self, model: bytes, threads: int = 1) -> Any:
        options = self.onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        options.register_custom_ops_library(str(onnx.library()))
        return self.onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, model: bytes, inputs: list[np.ndarray], threads: int) -> list[np.ndarray]:
        try:
            session = self.compiled(model, threads)
            return session.run(None, dict(zip([x.name for x in session.get_inputs()], inputs, strict=True)))
        except Exception as error:  # one class for each kind
            raise RuntimeError(str(error)) from error


Runtime = OpenVino | OnnxRuntime


@pytest.fixture(scope="module", params=[OpenVino, OnnxRuntime])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return request.param()


def run(
    runtime: Runtime,
    name: str,
    inputs: dict[str, Tensor | None],
    *,
    threads: int = 1,
    dynamic: bool = False,
    **attributes: Any,
) -> list[Tensor]:
    there = {key: x.contiguous() for key, x in inputs.items() if x is not None}
    model = node_model(name, there, dynamic=dynamic, **attributes).SerializeToString()
    return [torch.from_numpy(out) for out in runtime.run(model, [x.numpy() for x in there.values()], threads)]


def attend(
    runtime: Runtime, name: str, way: tuple[str, bool], heads: tuple[Tensor, Tensor, Tensor], others: dict, **more: Any
) -> Tensor:
    """An attention's [B, H, N, E], whichever way q, k and v are handed over. Widths that differ cannot be packed."""
    form, dynamic = way
    if form == "qkv" and heads[0].shape == heads[2].shape:
        inputs = {"qkv": torch.stack(heads).permute(1, 3, 0, 2, 4)}
        return run(runtime, name, inputs | others, dynamic=dynamic, **more)[0].transpose(1, 2)
    inputs = dict(zip("qkv", heads, strict=True))
    if form == "BHND":
        return run(runtime, name, inputs | others, dynamic=dynamic, **more)[0]
    inputs = {key: x.transpose(1, 2) for key, x in inputs.items()}
    return run(runtime, name, inputs | others, dynamic=dynamic, order="BNHD", **more)[0].transpose(1, 2)


# Each operator against its definition ---------------------------------------------------------------------------------


@given(case=native_cases.cases(), way=ways)
@example(case=DEIT, way=("qkv", True))
@example(case=DEIT, way=("BHND", False))
@sweep
def test_foveal(runtime: Runtime, case: native_cases.Case, way: tuple[str, bool]) -> None:
    q, k, v, bias, places = case.tensors()
    scale = case.width**-0.5
    given = {"key_bias": bias, "places": places}
    out = attend(
        runtime, "FovealAttention", way, (q, k, v), given, threads=case.threads, layout=case.sizes, scale=scale
    )  # fmt: skip
    chosen = native.functions.foveal_select(q, k, bias, places, case.sizes, scale)  # near-ties may go either way
    close(out, foveal.attend(q, k, v, chosen, case.layout, scale=scale, **given))


@given(case=test_native_sparsifiner.cases(), way=ways)
@example(case=test_native_sparsifiner.Case(), way=("qkv", True))
@sweep
def test_sparsifiner(runtime: Runtime, case: test_native_sparsifiner.Case, way: tuple[str, bool]) -> None:
    t = case.tensors()
    t |= {key: t[key][None] for key in ("basis", "share") if t[key] is not None and t[key].ndim == 2}
    heads = tuple(t.pop(key) for key in "qkv")
    numbers = {
        "budget": case.budget,
        "prefix": case.prefix,
        "tau": 0.0,
        "top": 0,
        "scale": test_native_sparsifiner.SCALE,
    }
    out = attend(runtime, "SparsifinerAttention", way, heads, t, threads=case.threads, **numbers)
    t |= dict(zip("qkv", heads, strict=True))
    lists = test_native_sparsifiner.as_lists(*test_native_sparsifiner.select(t, case))
    close(out, test_native_sparsifiner.definition(t, lists, case.prefix), tolerance=1e-5)


@given(problem=test_native_block.problems(), way=ways, threads=native_cases.thread_counts)
@sweep
def test_block(runtime: Runtime, problem: tuple, way: tuple[str, bool], threads: int) -> None:
    pattern, heads, bias = problem
    lists = dict(zip(("query_start", "queries", "key_start", "keys"), blocks.block_lists(pattern), strict=True))
    out = attend(runtime, "BlockAttention", way, heads, lists | {"key_bias": bias}, threads=threads, scale=0.3)
    close(out, test_native_block.masked(*heads, bias, pattern))


@given(st.integers(1, 60), st.integers(1, 20), st.booleans(), st.booleans(), ways, native_cases.thread_counts)
@sweep
def test_gather(
    runtime: Runtime, tokens: int, keys: int, counted: bool, wide: bool, way: tuple[str, bool], threads: int
) -> None:
    random = torch.Generator().manual_seed(tokens * keys)
    heads = torch.randn(3, 2, 3, tokens, 24, generator=random).unbind(0)
    indices = torch.randint(tokens, (2, 3, tokens, keys), generator=random)
    counts = torch.randint(keys + 1, (2, 3, tokens), generator=random) if counted else None
    bias = torch.rand(2, tokens, generator=random)
    given = {"indices": indices, "counts": counts, "key_bias": bias}
    if not wide:
        given |= {key: x.int() for key, x in given.items() if x is not None and not x.is_floating_point()}
    out = attend(runtime, "GatherAttention", way, heads, given, threads=threads, scale=0.3)
    close(out, gather.attend(*heads, indices, counts, scale=0.3, key_bias=bias))


@given(p=test_native_merge.problems(), dynamic=st.booleans(), threads=native_cases.thread_counts)
@sweep
def test_merge(runtime: Runtime, p: Any, dynamic: bool, threads: int) -> None:
    inputs = {"x": p.x, "keys": p.keys} | p.more
    numbers = {"plan": p.plan.numbers, "protect": p.plan.protect}
    found = Merged(*run(runtime, "MergeTokens", inputs, threads=threads, dynamic=dynamic, **numbers))
    index = test_native_merge.index_of(p, found)
    test_native_merge.check_decision(p, index)
    test_native_merge.check_rest(p, found, index)


def test_merge_reads_the_keys_of_a_packed_tensor(runtime: Runtime) -> None:
    x, qkv = torch.randn(2, 17, 8), torch.randn(2, 17, 3, 2, 5)
    expected = native.functions.merge(x, qkv[:, :, 1].transpose(1, 2), None, None, None, None, [4, 4, 1, 16, 5, 0], 0.0)
    found = run(runtime, "MergeTokens", {"x": x, "qkv": qkv}, plan=[4, 4, 1, 16, 5, 0], protect=0.0)
    for ours, wanted in zip(found, expected, strict=True):
        close(ours, wanted)


# What must not break them --------------------------------------------------------------------------------------------

LAYOUT = [4, 4, 1, 2, 2, 0, 2, 1]
QKV = {key: torch.zeros(1, 2, 17, 8) for key in "qkv"}
WRONG = {
    "a layout of six": ("FovealAttention", QKV, {"layout": LAYOUT[:6]}, "layout must be 9 numbers, not 6"),
    "no layout": ("FovealAttention", QKV, {}, "layout must be 9 numbers, not 0"),
    "a layout that is none": ("FovealAttention", QKV, {"layout": [4, 4, 1, 0, 2, 0, 2, 1]}, "must be at least 1"),
    "a budget of more cells than there are": ("FovealAttention", QKV, {"layout": [4, 4, 1, 2, 2, 0, 5, 1]}, "budget"),
    "a budget too small": ("FovealAttention", QKV, {"layout": [4, 4, 1, 2, 2, 0, 0, 1]}, "budget of 0 cells"),
    "a huge grid": ("FovealAttention", QKV, {"layout": [2**40, 4, 1, 2, 2, 0, 2, 1]}, "must be from 0 to"),
    "another grid's tokens": ("FovealAttention", QKV, {"layout": [5, 4, 1, 2, 2, 0, 2, 1]}, "the layout has 21 tokens"),
    "an unknown order": ("FovealAttention", QKV, {"layout": LAYOUT, "order": "NHBD"}, "order must be BHND or BNHD"),
    "too many names": ("FovealAttention", QKV, {"layout": LAYOUT, "given": "q,k,v,places"}, "names 4 inputs"),
    "a name twice": ("FovealAttention", QKV, {"layout": LAYOUT, "given": "q,k,k"}, "'k' is given twice"),
    "an unknown name": ("FovealAttention", QKV, {"layout": LAYOUT, "given": "q,k,w"}, "no input is called 'w'"),
    "a name missing": ("FovealAttention", QKV, {"layout": LAYOUT, "given": "q,k,key_bias"}, "'v' is missing"),
    "keys of another width": (
        "FovealAttention",
        QKV | {"k": torch.zeros(1, 2, 17, 9)},
        {"layout": LAYOUT},
        "q is .* but k is",
    ),
    "values of other tokens": (
        "FovealAttention",
        QKV | {"v": torch.zeros(1, 2, 16, 8)},
        {"layout": LAYOUT},
        "q is .* but v is",
    ),
    "three axes": ("FovealAttention", QKV | {"q": torch.zeros(2, 17, 8)}, {"layout": LAYOUT}, "must have 4 axes"),
    "integers": ("FovealAttention", QKV | {"q": torch.zeros(1, 2, 17, 8).int()}, {"layout": LAYOUT}, "must be f32"),
    "four of three": (
        "FovealAttention",
        {"qkv": torch.zeros(1, 17, 4, 2, 8)},
        {"layout": LAYOUT},
        r"qkv must be \[batch, tokens, 3, heads, channels\]",
    ),
    "a place off the grid": (
        "FovealAttention",
        QKV | {"places": torch.full((1, 16), 99)},
        {"layout": LAYOUT},
        "a patch stands at place",
    ),
    "a bias of another length": (
        "FovealAttention",
        QKV | {"key_bias": torch.zeros(1, 16)},
        {"layout": LAYOUT},
        "key_bias must be",
    ),
    "a key that is none": (
        "GatherAttention",
        QKV | {"indices": torch.full((1, 2, 17, 3), 17)},
        {},
        "indices must be tokens",
    ),
    "lists that end before they start": (
        "BlockAttention",
        QKV
        | {
            "query_start": torch.tensor([0, 20, 17]),
            "queries": torch.arange(17),
            "key_start": torch.tensor([0, 0, 0]),
            "keys": torch.tensor([], dtype=torch.int64),
        },
        {},
        "cannot end before they start",
    ),
    "a budget of nothing": (
        "SparsifinerAttention",
        QKV | {"coefficients": torch.zeros(1, 2, 17, 3), "basis": torch.zeros(1, 3, 17)},
        {"budget": 0},
        "budget must be from 1",
    ),
    "half a tail": (
        "SparsifinerAttention",
        QKV
        | {"coefficients": torch.zeros(1, 2, 17, 3), "basis": torch.zeros(1, 3, 17), "share": torch.zeros(1, 17, 3)},
        {"budget": 2},
        "come together or not at all",
    ),
    "more pairs than patches": (
        "MergeTokens",
        {"x": torch.zeros(1, 17, 8), "keys": torch.zeros(1, 17, 8)},
        {"plan": [4, 4, 1, 16, 9, 0]},
        "cannot join others",
    ),
    "a plan of another grid": (
        "MergeTokens",
        {"x": torch.zeros(1, 17, 8), "keys": torch.zeros(1, 17, 8)},
        {"plan": [4, 4, 1, 15, 2, 0]},
        "as the plan says",
    ),
    "a plan of four": (
        "MergeTokens",
        {"x": torch.zeros(1, 17, 8), "keys": torch.zeros(1, 17, 8)},
        {"plan": [4, 4, 1, 16]},
        "plan must be 7 numbers",
    ),
}


#: What the kernels say, where OpenVINO's shapes say it sooner.
IN_THE_KERNELS = {
    "another grid's tokens": "layout",
    "keys of another width": "k has another shape",
    "values of other tokens": "v has another shape",
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("wrong", WRONG)
def test_says_what_is_wrong(runtime: Runtime, wrong: str, dynamic: bool) -> None:
    """OpenVINO asks for shapes before it runs anything; ONNX Runtime hears of them from the kernels."""
    name, inputs, attributes, message = WRONG[wrong]
    expected = message if isinstance(runtime, OpenVino) else IN_THE_KERNELS.get(wrong, message)
    with pytest.raises(RuntimeError, match=expected) as told:
        run(runtime, name, inputs, dynamic=dynamic, **attributes)
    assert f"attendless.{name}" in str(told.value)
