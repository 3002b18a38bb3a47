"""The kernels as an OpenVINO extension: batches, threads, files, and where it comes from. What the operators compute is
tested in test_operators.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attendless import compiled
from attendless.errors import UserError
from attendless.export import extension
from attendless.export.openvino_core import core_with_kernels
from native_cases import close
from onnx_nodes import DEIT, any_batch, expected, foveal_inputs, node_model, thread_seconds
from test_operators import WRONG

openvino = pytest.importorskip("openvino")
pytest.importorskip("onnx")


@pytest.fixture(scope="module", name="core")
def with_the_operators() -> Any:
    if reason := extension.available():
        pytest.skip(reason)
    return core_with_kernels()


def compiled_for(core: Any, model: Any, threads: int = 1) -> Any:
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    return core.compile_model(model, "CPU", hints)


# Batches, threads, files ----------------------------------------------------------------------------------------------


def foveal_model(core: Any) -> Any:
    return core.read_model(any_batch().SerializeToString())


def test_one_model_takes_any_batch(core: Any) -> None:
    model = foveal_model(core)
    assert str(model.outputs[0].partial_shape) == "[?,197,3,64]"
    infer = compiled_for(core, model)
    for batch in (1, 3, 2, 1):
        inputs = foveal_inputs(batch)
        close(torch.from_numpy(infer([inputs["qkv"].numpy()])[0]), expected(inputs))


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


def test_nothing_is_copied_on_the_way(core: Any) -> None:
    """What OpenVINO runs is the operator alone, and it writes into the tensor the caller gave."""
    infer = compiled_for(core, foveal_model(core))
    ran = [node.get_rt_info()["layerType"].astype(str) for node in infer.get_runtime_model().get_ops()]
    assert sorted(ran) == ["Input", "Output", "Reference"]
    inputs, out = foveal_inputs(2), np.full((2, 197, 3, 64), np.nan, dtype=np.float32)
    request = infer.create_infer_request()
    request.set_output_tensor(openvino.Tensor(out, shared_memory=True))
    request.infer([inputs["qkv"].numpy()], share_inputs=True)
    close(torch.from_numpy(out), expected(inputs))


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


#: OpenVINO's infer() on one thread drops an exception and leaves the request in the thread's queue. A later infer() of
#: any model in the process runs that request again, which has been freed. Hence a process of its own.
DROPPED = """
import sys, numpy, openvino
core = openvino.Core()
core.add_extension(sys.argv[1])
hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
infer = core.compile_model(sys.argv[2], "CPU", hints)
try:
    found = infer(list(numpy.load(sys.argv[3]).values()))[0]
except RuntimeError as error:
    print(error)
else:
    print(numpy.isnan(found).all())
"""


def test_a_dropped_error_leaves_nan(core: Any, tmp_path: Path) -> None:
    name, inputs, attributes, message = WRONG["a place off the grid"]
    model, values = tmp_path / "model.onnx", tmp_path / "inputs.npz"
    model.write_bytes(node_model(name, inputs, dynamic=False, **attributes).SerializeToString())
    np.savez(values, **{key: x.numpy() for key, x in inputs.items()})
    script = [sys.executable, "-c", DROPPED, str(extension.path()), str(model), str(values)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n" or message in done.stdout


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
