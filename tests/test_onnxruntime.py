"""The kernels as a library of operators for ONNX Runtime: batches, threads, files. What the operators compute is tested
in test_operators.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attendless
from attendless import compiled
from attendless.errors import UserError
from attendless.export import export, onnx, open_runner
from native_cases import close
from onnx_nodes import DEIT, any_batch, expected, foveal_inputs, node_model, thread_seconds
from test_export import images, tiny

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
if reason := onnx.kernels_unavailable():
    pytest.skip(reason, allow_module_level=True)
ROOT = Path(__file__).parents[1]


def session_of(model: Any, threads: int = 1) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(str(onnx.library()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_one_model_takes_any_batch() -> None:
    session = session_of(any_batch())
    for batch in (1, 3, 2, 1):
        inputs = foveal_inputs(batch)
        (out,) = session.run(None, {"qkv": inputs["qkv"].numpy()})
        close(torch.from_numpy(out), expected(inputs))


@pytest.mark.parametrize("wanted", [1, 2])
def test_uses_the_threads_onnx_runtime_was_told(wanted: int) -> None:
    """Seconds of processor over seconds: on a busy machine fewer than wanted, never more."""
    model = node_model("FovealAttention", foveal_inputs(16), dynamic=False, layout=DEIT.sizes, scale=0.125)
    session, inputs = session_of(model, wanted), {"qkv": foveal_inputs(16)["qkv"].numpy()}
    session.run(None, inputs)
    spent = thread_seconds()
    for _ in range(10):
        session.run(None, inputs)
    after = thread_seconds()
    worked = [thread for thread, seconds in after.items() if seconds - spent.get(thread, 0) >= 0.02]
    assert 1 <= len(worked) <= wanted
    assert set(after) <= set(spent)  # nobody started threads of their own


READ_AGAIN = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
session = onnxruntime.InferenceSession(sys.argv[2], options)
numpy.save(sys.argv[4], session.run(None, {"images": numpy.load(sys.argv[3])})[0])
assert "attendless" not in sys.modules and "torch" not in sys.modules
"""


def test_a_file_with_kernels_is_read_where_there_is_no_attendless(tmp_path: Path) -> None:
    """One line loads the library that lies beside the model."""
    model = tiny("full/2xfoveal:keep=0.3,cell=2,tile=2", tokens="tome:r=2")
    found = export(model, tmp_path / "fast.onnx", kernels=True, batch=2, measure=False)
    assert found.description.kernels
    # Of three layers the last computes for the class token alone: it looks at all, and merges nothing.
    assert (found.operators["attendless.FovealAttention"], found.operators["attendless.MergeTokens"]) == (1, 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fast.onnx", onnx.LIBRARY]
    np.save(tmp_path / "in.npy", images(2).numpy())
    files = [tmp_path / name for name in (onnx.LIBRARY, "fast.onnx", "in.npy", "out.npy")]
    done = subprocess.run([sys.executable, "-c", READ_AGAIN, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.inference_mode():
        close(torch.from_numpy(np.load(tmp_path / "out.npy")), model(images(2)), tolerance=1e-4)
    close(open_runner(found.path)(images(2)), torch.from_numpy(np.load(tmp_path / "out.npy")))


def test_without_the_library_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = export(tiny("foveal:cell=2,tile=2"), tmp_path / "fast.onnx", kernels=True, measure=False)
    monkeypatch.setattr(onnx, "LIBRARY", "libelsewhere.so")
    with pytest.raises(UserError, match=r"needs attendless's kernels: .*libelsewhere\.so' is missing"):
        open_runner(found.path)
    with pytest.raises(UserError, match="the kernels cannot stand beside the model"):
        export(tiny("foveal:cell=2,tile=2"), tmp_path / "more.onnx", kernels=True, measure=False)
    monkeypatch.setattr(compiled, "available", False)
    monkeypatch.setattr(compiled, "reason", "turned off")
    assert "turned off" in onnx.kernels_unavailable()


def test_bench_races_it() -> None:
    table = attendless.bench(tiny("foveal:cell=2,tile=2"), like=tiny(), runtimes=["onnx", "onnx-kernels"], budget=0.05)
    assert [row.setup.runtime for row in table if row.setup.attention != "full"] == ["onnx", "onnx-kernels"]


PLACES = """
#include <cstddef>
#include <onnxruntime_c_api.h>
#include "onnxruntime.hpp"
namespace ours = attendless::onnxruntime;
#define SAME(type, theirs, name) \\
  static_assert(offsetof(ours::type, name) == offsetof(theirs, name), #name " stands elsewhere")
"""


def test_the_places_in_the_table_are_those_of_the_real_header(tmp_path: Path) -> None:
    used = {
        "Api": ("OrtApi", names_in("struct Api {")),
        "CustomOp": ("OrtCustomOp", names_in("struct CustomOp {")),
        "ApiBase": ("OrtApiBase", names_in("struct ApiBase {")),
    }
    assert [len(names) for _, names in used.values()] == [21, 18, 2]
    lines = [f"SAME({ours}, {theirs}, {name});" for ours, (theirs, names) in used.items() for name in names]
    constants = {
        "kUndefined": "ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED",
        "kFloat": "ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT",
        "kInt32": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32",
        "kInt64": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64",
        "kBfloat16": "ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16",
        "kRequired": "INPUT_OUTPUT_REQUIRED",
        "kOptional": "INPUT_OUTPUT_OPTIONAL",
        "kVariadic": "INPUT_OUTPUT_VARIADIC",
        "kFail": "ORT_FAIL",
        "kInvalidArgument": "ORT_INVALID_ARGUMENT",
    }
    lines += [f'static_assert(int(ours::{mine}) == int({theirs}), "{mine}");' for mine, theirs in constants.items()]
    lines.append('static_assert(sizeof(ours::CustomOp) >= sizeof(OrtCustomOp) || ORT_API_VERSION > 21, "size");')
    (tmp_path / "places.cpp").write_text(PLACES + "\n".join(lines))
    folders = ["-I/usr/include/onnxruntime", f"-I{ROOT / 'native'}"]
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", *folders, tmp_path / "places.cpp"], capture_output=True, text=True
    )
    if "onnxruntime_c_api.h: No such file" in done.stderr:
        pytest.skip("needs onnxruntime_c_api.h, which Debian's libonnxruntime-dev brings")
    assert done.returncode == 0, done.stderr


def names_in(start: str) -> list[str]:
    """The functions a struct of onnxruntime.hpp names."""
    text = (ROOT / "native" / "onnxruntime.hpp").read_text()
    body = text[text.index(start) :]
    lines = body[: body.index("};")].splitlines()
    return [line.split("(*")[1].split(")")[0] for line in lines if "(*" in line]
