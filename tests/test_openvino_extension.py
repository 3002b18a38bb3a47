"""The kernels as OpenVINO operators: each against its definition, from an ONNX graph, and what must not break them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
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
from attendless import compiled
from attendless.errors import UserError
from attendless.export import extension
from attendless.sparse import foveal, gather, native, ops
from attendless.sparse.merging import Merged
from native_cases import close
from onnx_nodes import node_model

openvino = pytest.importorskip("openvino")
pytest.importorskip("onnx")
#: Each is compiled by OpenVINO, which takes longer than to compute it.
sweep = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: How q, k and v come, and whether their sizes are known when the model is compiled.
ways = st.tuples(st.sampled_from(["BHND", "BNHD", "qkv"]), st.booleans())
DEIT = native_cases.Case(foveal.layout(14, 14, 1, keep=0.1), 2, 3, 64, 64, False, 1.0, 0)


@pytest.fixture(scope="module", name="core")
def with_the_operators() -> Any:
    if reason := extension.available():
        pytest.skip(reason)
    core = openvino.Core()
    extension.add_to(core)
    return core


def compiled_for(core: Any, model: Any, threads: int = 1) -> Any:
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    return core.compile_model(model, "CPU", hints)


def run(
    core: Any,
    name: str,
    inputs: dict[str, Tensor | None],
    *,
    threads: int = 1,
    dynamic: bool = False,
    **attributes: Any,
) -> list[Tensor]:
    there = {key: x.contiguous() for key, x in inputs.items() if x is not None}
    model = node_model(name, there, dynamic=dynamic, **attributes).SerializeToString()
    found = compiled_for(core, core.read_model(model), threads)([x.numpy() for x in there.values()])
    return [torch.from_numpy(np.array(value)) for value in found.values()]


def attend(
    core: Any, name: str, way: tuple[str, bool], heads: tuple[Tensor, Tensor, Tensor], others: dict, **more: Any
) -> Tensor:
    """An attention's [B, H, N, E], whichever way q, k and v are handed over. Widths that differ cannot be packed."""
    form, dynamic = way
    if form == "qkv" and heads[0].shape == heads[2].shape:
        inputs = {"qkv": torch.stack(heads).permute(1, 3, 0, 2, 4)}
        return run(core, name, inputs | others, dynamic=dynamic, **more)[0].transpose(1, 2)
    inputs = dict(zip("qkv", heads, strict=True))
    if form == "BHND":
        return run(core, name, inputs | others, dynamic=dynamic, **more)[0]
    inputs = {key: x.transpose(1, 2) for key, x in inputs.items()}
    return run(core, name, inputs | others, dynamic=dynamic, order="BNHD", **more)[0].transpose(1, 2)


# Each operator against its definition ---------------------------------------------------------------------------------


@given(case=native_cases.cases(), way=ways)
@example(case=DEIT, way=("qkv", True))
@example(case=DEIT, way=("BHND", False))
@sweep
def test_foveal(core: Any, case: native_cases.Case, way: tuple[str, bool]) -> None:
    q, k, v, bias, places = case.tensors()
    scale = case.width**-0.5
    given = {"key_bias": bias, "places": places}
    out = attend(
        core, "FovealAttention", way, (q, k, v), given, threads=case.threads, layout=case.sizes, scale=scale
    )  # fmt: skip
    chosen = native.foveal_select(q, k, bias, places, case.sizes, scale)  # near-ties may go either way
    close(out, foveal.attend(q, k, v, chosen, case.layout, scale=scale, **given))


@given(case=test_native_sparsifiner.cases(), way=ways)
@example(case=test_native_sparsifiner.Case(), way=("qkv", True))
@sweep
def test_sparsifiner(core: Any, case: test_native_sparsifiner.Case, way: tuple[str, bool]) -> None:
    t = case.tensors()
    heads = tuple(t.pop(key) for key in "qkv")
    numbers = {
        "budget": case.budget,
        "prefix": case.prefix,
        "tau": 0.0,
        "top": 0,
        "scale": test_native_sparsifiner.SCALE,
    }
    out = attend(core, "SparsifinerAttention", way, heads, t, threads=case.threads, **numbers)
    t |= dict(zip("qkv", heads, strict=True))
    lists = test_native_sparsifiner.as_lists(*test_native_sparsifiner.select(t, case))
    close(out, test_native_sparsifiner.definition(t, lists, case.prefix), tolerance=1e-5)


@given(problem=test_native_block.problems(), way=ways, threads=native_cases.thread_counts)
@sweep
def test_block(core: Any, problem: tuple, way: tuple[str, bool], threads: int) -> None:
    pattern, heads, bias = problem
    lists = dict(zip(("query_start", "queries", "key_start", "keys"), ops.block_lists(pattern), strict=True))
    out = attend(core, "BlockAttention", way, heads, lists | {"key_bias": bias}, threads=threads, scale=0.3)
    close(out, test_native_block.masked(*heads, bias, pattern))


@given(st.integers(1, 60), st.integers(1, 20), st.booleans(), st.booleans(), ways, native_cases.thread_counts)
@sweep
def test_gather(
    core: Any, tokens: int, keys: int, counted: bool, wide: bool, way: tuple[str, bool], threads: int
) -> None:
    random = torch.Generator().manual_seed(tokens * keys)
    heads = torch.randn(3, 2, 3, tokens, 24, generator=random).unbind(0)
    indices = torch.randint(tokens, (2, 3, tokens, keys), generator=random)
    counts = torch.randint(keys + 1, (2, 3, tokens), generator=random) if counted else None
    bias = torch.rand(2, tokens, generator=random)
    given = {"indices": indices, "counts": counts, "key_bias": bias}
    if not wide:
        given |= {key: x.int() for key, x in given.items() if x is not None and not x.is_floating_point()}
    out = attend(core, "GatherAttention", way, heads, given, threads=threads, scale=0.3)
    close(out, gather.attend(*heads, indices, counts, scale=0.3, key_bias=bias))


@given(p=test_native_merge.problems(), dynamic=st.booleans(), threads=native_cases.thread_counts)
@sweep
def test_merge(core: Any, p: Any, dynamic: bool, threads: int) -> None:
    inputs = {"x": p.x, "keys": p.keys} | p.more
    numbers = {"plan": p.plan.numbers, "protect": p.plan.protect}
    found = Merged(*run(core, "MergeTokens", inputs, threads=threads, dynamic=dynamic, **numbers))
    index = test_native_merge.index_of(p, found)
    test_native_merge.check_decision(p, index)
    test_native_merge.check_rest(p, found, index)


def test_merge_reads_the_keys_of_a_packed_tensor(core: Any) -> None:
    x, qkv = torch.randn(2, 17, 8), torch.randn(2, 17, 3, 2, 5)
    expected = native.merge(x, qkv[:, :, 1].transpose(1, 2), None, None, None, None, [4, 4, 1, 16, 5, 0], 0.0)
    found = run(core, "MergeTokens", {"x": x, "qkv": qkv}, plan=[4, 4, 1, 16, 5, 0], protect=0.0)
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted)


# Batches, threads, files ----------------------------------------------------------------------------------------------


def foveal_inputs(batch: int) -> dict[str, Tensor]:
    return {"qkv": torch.randn(batch, 197, 3, 3, 64)}


def expected(inputs: dict[str, Tensor]) -> Tensor:
    q, k, v = inputs["qkv"].permute(2, 0, 3, 1, 4)
    return native.foveal_forward(q, k, v, None, None, DEIT.sizes, 0.125).transpose(1, 2)


def foveal_model(core: Any) -> Any:
    """Any number of images."""
    model = node_model("FovealAttention", foveal_inputs(2), dynamic=False, layout=DEIT.sizes, scale=0.125)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    return core.read_model(model.SerializeToString())


def test_one_model_takes_any_batch(core: Any) -> None:
    model = foveal_model(core)
    assert str(model.outputs[0].partial_shape) == "[?,197,3,64]"
    infer = compiled_for(core, model)
    for batch in (1, 3, 2, 1):
        inputs = foveal_inputs(batch)
        assert torch.equal(torch.from_numpy(infer([inputs["qkv"].numpy()])[0]), expected(inputs))


@pytest.mark.parametrize("wanted", [1, 2])
def test_uses_the_threads_openvino_was_told(core: Any, wanted: int) -> None:
    """Seconds of processor over seconds: on a busy machine fewer than wanted, never more."""
    model = node_model("FovealAttention", foveal_inputs(16), dynamic=False, layout=DEIT.sizes, scale=0.125)
    infer = compiled_for(core, core.read_model(model.SerializeToString()), wanted)
    inputs = [foveal_inputs(16)["qkv"].numpy()]
    infer(inputs)
    before = set(thread_seconds())
    spent = thread_seconds()
    for _ in range(10):
        infer(inputs)
    after = thread_seconds()
    worked = [thread for thread, seconds in after.items() if seconds - spent.get(thread, 0) >= 0.02]
    assert 1 <= len(worked) <= wanted
    assert set(after) <= before  # nobody started threads of their own


def thread_seconds() -> dict[str, float]:
    """Seconds of processor each thread of this process has had."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        found[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


READ_AGAIN = """
import sys, numpy, openvino
core = openvino.Core()
core.add_extension(sys.argv[1])
infer = core.compile_model(core.read_model(sys.argv[2]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
numpy.save(sys.argv[4], infer([numpy.load(sys.argv[3])])[0])
assert "attendless" not in sys.modules and "torch" not in sys.modules
"""


def test_a_saved_model_is_read_where_there_is_no_attendless(core: Any, tmp_path: Path) -> None:
    """One line loads the library, copied beside the model."""
    library = shutil.copy(extension.path(), tmp_path)
    openvino.save_model(foveal_model(core), tmp_path / "model.xml")
    inputs = foveal_inputs(2)
    np.save(tmp_path / "in.npy", inputs["qkv"].numpy())
    files = [library, *(tmp_path / name for name in ("model.xml", "in.npy", "out.npy"))]
    done = subprocess.run([sys.executable, "-c", READ_AGAIN, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "out.npy")), expected(inputs))


# What must not break it -----------------------------------------------------------------------------------------------

LAYOUT = [4, 4, 1, 2, 2, 0, 2, 1]
QKV = {key: torch.zeros(1, 2, 17, 8) for key in "qkv"}
WRONG = {
    "a layout of seven": ("FovealAttention", QKV, {"layout": LAYOUT[:7]}, "layout must be 8 numbers, not 7"),
    "no layout": ("FovealAttention", QKV, {}, "layout must be 8 numbers, not 0"),
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
    "integers": ("FovealAttention", QKV | {"q": torch.zeros(1, 2, 17, 8).int()}, {"layout": LAYOUT}, "must be float32"),
    "four of three": (
        "FovealAttention",
        {"qkv": torch.zeros(1, 17, 4, 2, 8)},
        {"layout": LAYOUT},
        r"qkv must be \[batch, tokens, 3, heads, channels\]",
    ),
    "a place off the grid": (
        "FovealAttention",
        QKV | {"places": torch.full((1, 16), 2**35)},
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
        QKV | {"coefficients": torch.zeros(1, 2, 17, 3), "basis": torch.zeros(3, 17)},
        {"budget": 0},
        "budget must be from 1",
    ),
    "half a tail": (
        "SparsifinerAttention",
        QKV | {"coefficients": torch.zeros(1, 2, 17, 3), "basis": torch.zeros(3, 17), "share": torch.zeros(17, 3)},
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
    "a plan of five": (
        "MergeTokens",
        {"x": torch.zeros(1, 17, 8), "keys": torch.zeros(1, 17, 8)},
        {"plan": [4, 4, 1, 16, 2]},
        "plan must be 6 numbers",
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("wrong", WRONG)
def test_says_what_is_wrong(core: Any, wrong: str, dynamic: bool) -> None:
    name, inputs, attributes, message = WRONG[wrong]
    with pytest.raises(RuntimeError, match=message):
        run(core, name, inputs, dynamic=dynamic, **attributes)


def test_a_damaged_file_throws(core: Any, tmp_path: Path) -> None:
    openvino.save_model(foveal_model(core), tmp_path / "model.xml")
    text = (tmp_path / "model.xml").read_text()
    sound = ", ".join(map(str, DEIT.sizes))
    assert sound in text
    for layout in ("14, 14, 1", "14, 14, 1, 2, 1, 0, 99999, 1", "-14, 14, 1, 2, 1, 0, 5, 1", "x"):
        (tmp_path / "model.xml").write_text(text.replace(sound, layout))
        with pytest.raises(RuntimeError):
            core.read_model(tmp_path / "model.xml")


def test_says_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reason() -> str:
        extension._made.cache_clear()
        return extension.available()

    if not compiled.available:
        pytest.skip(compiled.reason)
    try:
        with monkeypatch.context() as m:
            m.setenv("XDG_CACHE_HOME", str(tmp_path))
            m.setenv("PATH", str(tmp_path))
            m.delenv("CXX", raising=False)
            assert "no C++ compiler" in reason()
            with pytest.raises(UserError, match="no C\\+\\+ compiler"):
                extension.path()
            m.setenv("CXX", "/bin/false")
            assert "/bin/false cannot build it" in reason()
            assert not list(tmp_path.rglob("*.so*"))
        with monkeypatch.context() as m:
            m.setattr(extension.importlib.util, "find_spec", lambda name: None)
            assert "openvino is not installed" in reason()
        with monkeypatch.context() as m:
            m.setattr(compiled, "available", False)
            m.setattr(compiled, "reason", "turned off")
            assert "turned off" in reason()
        with monkeypatch.context() as m:
            (tmp_path / "file").touch()
            m.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
            assert "it cannot be kept" in reason()
    finally:
        extension._made.cache_clear()
