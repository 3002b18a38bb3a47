"""OpenVINO: IR (`.xml` and `.bin`), with attendless's kernels beside it where they can be built.

core = openvino.Core()
core.add_extension("libattendless_openvino.so")  # only where the kernels are used
model = core.compile_model("fast.xml", "CPU")
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import UserError
from ..measure.precision import no_bf16
from . import bf16_graph, description, extension, onnx
from .checksum import BLANK, check_seal, seal
from .description import KEY, Description
from .openvino_core import core, core_with_kernels
from .packages import missing, need
from .translate import DOMAIN

SUFFIX = ".xml"
#: Whether a file has our kernels unless it is said.
KERNELS = True
PRECISIONS = ("fp32", "bf16", "int8")
#: Channels of a token that share a scale in layers that are quantised at run time. It divides the widths of all ViTs.
GROUP = 64
Run = Callable[[Tensor], tuple[Tensor, ...]]


def unavailable() -> str:
    return missing("openvino", "openvino") or missing("onnx", *onnx.WRITERS)


def kernels_unavailable() -> str:
    """Why the kernels cannot stand beside a model; empty if they can."""
    return extension.available()


def write(program: ExportedProgram, path: Path, *, opset: int | None = None) -> None:
    """Write a traced graph, by way of ONNX; where operators of ours are in it, the library with the kernels too."""
    openvino = need("openvino", "openvino")
    between = path.with_suffix(".between.onnx")
    ours = onnx.translated(program, between, opset=opset)
    model = openvino.convert_model(between, extension=[str(extension.path())] if ours else None)
    between.unlink()
    bf16_graph.merge_heads(model)  # in every file: without a hint OpenVINO computes in bf16 where the CPU can
    openvino.save_model(model, path, compress_to_fp16=False)
    if ours:
        shutil.copy2(extension.path(), path.parent / extension.NAME)


def stamp(path: Path, about: Description) -> None:
    """Let a file say what it is."""
    openvino = need("openvino", "openvino")
    model = read_with_kernels(path)
    model.set_rt_info(dataclasses.replace(about, digest=BLANK).as_json(), KEY)
    again = path.with_name(f"stamped-{path.name}")  # what is read lies in the file it was read from
    openvino.save_model(model, again, compress_to_fp16=False)
    del model
    for old, new in ((path, again), (_weights(path), _weights(again))):
        new.replace(old)
    seal(path, _weights(path))


def operators(path: Path) -> dict[str, int]:
    """How often each operator stands in a file's graph, the commonest first; constants and ends are none."""
    kinds = (node.get_type_info() for node in read_with_kernels(path).get_ops())
    found = Counter(f"{DOMAIN}.{kind.name}" if kind.version_id == DOMAIN else kind.name for kind in kinds)
    return {name: count for name, count in found.most_common() if name not in ("Constant", "Parameter", "Result")}


def files(path: Path) -> list[Path]:
    """What an export consists of, that which is opened last."""
    return [*sorted(path.parent.glob("*.so")), _weights(path), path]


def open_file(path: Path, threads: int | None = None) -> tuple[Run, Description]:
    check_seal(path, _weights(path))
    model = read_with_kernels(path)
    text = model.get_rt_info(KEY).astype(str) if model.has_rt_info(KEY) else None
    about = description.read(text, path)
    return opened(model, threads, about.floats), about


def open_raw(path: Path, threads: int | None = None, floats: str = "fp32") -> Run:
    """As `open_file`, before there is a description."""
    return opened(read_with_kernels(path), threads, floats)


def opened(model: Any, threads: int | None = None, floats: str = "fp32") -> Run:
    """A model in memory, compiled."""
    return _runs(_compiled(model, threads, floats))


def read_with_kernels(path: Path) -> Any:
    """A file's model, with the kernels if the file asks for them: those of this installation, which are checked, before
    any library that lies beside a file."""
    reader = core_with_kernels() if f'version="{DOMAIN}"'.encode() in path.read_bytes() else core()
    try:
        return reader.read_model(path)
    except Exception as error:  # one class for whatever is wrong, in a page of text
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = lines[-1][:300] if lines else type(error).__name__
        raise UserError(f"{str(path)!r} cannot be opened by OpenVINO: {told}") from None


def _weights(path: Path) -> Path:
    return path.with_suffix(".bin")


def _compiled(model: Any, threads: int | None, floats: str) -> Any:
    """`floats`: fp32, or bf16, which is computed in fp32 on a CPU without bf16 instructions."""
    bf16 = floats == "bf16" and not no_bf16()
    settings = {
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32",  # without a hint OpenVINO decides by the CPU
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(GROUP),
    }
    if bf16:
        bf16_graph.halve(model)
    return core().compile_model(model, "CPU", settings)


def _runs(model: Any) -> Run:
    request, count = model.create_infer_request(), len(model.outputs)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        given = images.contiguous().numpy()  # kept until the result is there: OpenVINO reads it in place
        request.start_async({0: given}, share_inputs=True)  # infer() on one thread would not tell of an error
        request.wait()
        return tuple(torch.from_numpy(request.get_output_tensor(i).data.copy()) for i in range(count))

    return run
