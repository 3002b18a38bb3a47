"""The exported formats as runtimes that `bench` can time: a model is exported for one batch, into a folder that is gone
once it is open."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from ..measure.clock import Call
from ..measure.runtime import Runtime, register_runtime
from . import onnx
from .exporting import FORMATS, write


def _prepare(format: str, kernels: bool | None, model: nn.Module, images: Tensor) -> Call:
    module = FORMATS[format]
    with tempfile.TemporaryDirectory(prefix="attendless-") as folder:
        file = Path(folder) / f"model{module.SUFFIX}"
        write(model, file, batch=len(images), format=format, kernels=kernels)
        run = module.open_raw(file)
    return partial(run, images.clone())


for _name, _module in FORMATS.items():
    register_runtime(Runtime(_name, partial(_prepare, _name, None), _module.unavailable))
register_runtime(
    Runtime("onnx-kernels", partial(_prepare, "onnx", True), lambda: onnx.unavailable() or onnx.kernels_unavailable())
)
