"""OpenVINO: IR (`.xml` and `.bin`), with attendless's kernels beside it where they can be built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import description
from .description import KEY, Description
from .packages import need
from .sealed import check_seal


def open_file(path: Path, threads: int | None = None) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Description]:
    check_seal(path, path.with_suffix(".bin"))
    core = need("openvino", "openvino").Core()
    try:
        model = core.read_model(path)
        text = str(model.get_rt_info(KEY).astype(str)) if model.has_rt_info(KEY) else None
    except Exception as error:
        raise UserError(f"{str(path)!r} cannot be opened by OpenVINO: {_last_line(error)}") from None
    return runs(compiled(core, model, threads)), description.read(text, path)


def compiled(core: Any, model: Any, threads: int | None = None) -> Any:
    settings = {
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # what PyTorch computes; OpenVINO would take bf16 where the CPU has it
    }
    return core.compile_model(model, "CPU", settings)


def runs(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
    request, count = model.create_infer_request(), len(model.outputs)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        found = request.infer({0: images.contiguous().numpy()}, share_inputs=True)
        return tuple(torch.from_numpy(found[i]) for i in range(count))

    return run


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
