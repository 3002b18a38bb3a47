"""ONNX, opened by ONNX Runtime: standard operators, so that it runs anywhere; or, if asked for, with attendless's
kernels beside it.

options = onnxruntime.SessionOptions()
options.register_custom_ops_library("./libattendless_onnxruntime.so")  # only where the kernels are used
session = onnxruntime.InferenceSession("fast.onnx", options)
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import compiled
from ..errors import UserError
from . import description, fuse_qkv, layer_names, translate
from .checksum import BLANK, check_seal, seal
from .description import KEY, Description
from .packages import missing, need

SUFFIX = ".onnx"
#: Whether a file has our kernels unless it is said.
KERNELS = False
PRECISIONS = ("fp32", "int8")
#: The kernels as ONNX Runtime's operators: made at install, and copied beside a model that uses them.
LIBRARY = "libattendless_onnxruntime.so"
#: What writing takes, and what running takes.
WRITERS, RUNNERS = ("onnx", "onnxscript"), ("onnxruntime",)
#: The oldest that has all it takes; every runtime of the last years knows it.
OPSET = 18
#: Protobuf holds no more in one file.
_LARGEST = 2**31 - 1
Run = Callable[[Tensor], tuple[Tensor, ...]]


def unavailable() -> str:
    return missing("onnx", *WRITERS, *RUNNERS)


def check_opset(format: str, opset: int) -> None:
    """Raise unless a file of this format can be written with it."""
    if format != "onnx":
        raise UserError(f"--opset {opset}: {format} files have no ONNX opset; give --format onnx")
    newest = need("onnx", "onnx").defs.onnx_opset_version()
    if not OPSET <= opset <= newest:
        raise UserError(f"--opset {opset}: expected one from {OPSET} to {newest}")


def kernels_unavailable() -> str:
    """Why the kernels cannot stand beside a model; empty if they can."""
    if not compiled.available:
        return f"the native kernels are not available: {compiled.reason}"
    return "" if library().is_file() else f"{str(library())!r} is missing: installing attendless on Linux makes it"


def library() -> Path:
    return Path(compiled.kernels().__file__).with_name(LIBRARY)


def write(program: ExportedProgram, path: Path, *, opset: int | None = None) -> None:
    """Write a traced graph; where operators of ours are in it, the library with the kernels too."""
    if translated(program, path, opset=opset):
        shutil.copy2(library(), path.parent / LIBRARY)


def translated(program: ExportedProgram, path: Path, *, opset: int | None = None) -> bool:
    """Write a traced graph; operators of ours in it become nodes of the domain `attendless`. Whether there are any."""
    need("onnx", *WRITERS)
    weights = sum(value.nbytes for value in program.state_dict.values())
    if weights >= _LARGEST:
        raise UserError(
            f"a model of {weights / 1e9:.1f} GB does not fit into an ONNX file, which holds 2 GB: use openvino"
        )
    # The fused kernel's results lie in memory as no other runtime's do, and views of them may not be views there.
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own parts
        try:
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=opset or OPSET,
                input_names=["images"],
                custom_translation_table=translate.standard() | translate.kernels(),
            )
        except Exception as error:  # a page of advice, with the reason in the middle of it
            _, _, reason = str(error).partition("## Exception summary")
            told = next(filter(None, reason.splitlines()), "") or type(error).__name__
            raise UserError(f"this model cannot be written as ONNX: {told[:300]}") from error
    assert made is not None
    made.save(path, external_data=False)
    rewrite(path, layer_names.name_layers)
    ours = any(name.startswith(f"{translate.DOMAIN}.") for name in operators(path))
    if ours:
        rewrite(path, fuse_qkv.pack)
    return ours


def stamp(path: Path, about: Description) -> None:
    """Let a file say what it is. Protobuf joins what is written one after the other."""
    model = need("onnx", "onnx").ModelProto()
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, dataclasses.replace(about, digest=BLANK).as_json()
    with path.open("ab") as file:
        file.write(model.SerializeToString())
    seal(path)


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change a file's graph in place."""
    onnx = need("onnx", "onnx")
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def operators(path: Path) -> dict[str, int]:
    """How often each operator stands in a file's graph, the commonest first."""
    model = need("onnx", "onnx").load(path, load_external_data=False)
    named = (f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in model.graph.node)
    return dict(Counter(named).most_common())


def files(path: Path) -> list[Path]:
    """What an export consists of, that which is opened last."""
    return [*sorted(path.parent.glob("*.so")), path]


def open_file(path: Path, threads: int | None = None) -> tuple[Run, Description]:
    check_seal(path)
    session = _session(path, threads)
    return _runs(session), description.read(session.get_modelmeta().custom_metadata_map.get(KEY), path)


def open_raw(path: Path, threads: int | None = None, floats: str = "fp32") -> Run:
    """As `open_file`, before there is a description. `floats` is fp32: this runtime computes nothing else."""
    return _runs(_session(path, threads))


def _session(path: Path, threads: int | None) -> Any:
    runtime = need("onnx", *RUNNERS)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # threads that wait would take others' time
    if not kernels_unavailable():  # those of this installation; a library that lies beside a file is never loaded
        options.register_custom_ops_library(str(library()))
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever is wrong in the file, each in a class of its own
        told = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        if f"{translate.DOMAIN}:" in told and (why := kernels_unavailable()):
            raise UserError(f"{str(path)!r} needs attendless's kernels: {why}") from None
        raise UserError(f"{str(path)!r} cannot be opened by ONNX Runtime: {told}") from None


def _runs(session: Any) -> Run:
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(None, {name: images.contiguous().numpy()})))

    return run
