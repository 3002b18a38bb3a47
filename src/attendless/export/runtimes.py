"""The exported formats as runtimes that `bench` can time: a model is exported for one batch, into a temporary
folder that is removed after opening."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..measure.clock import Call
from ..measure.runtime import Runtime, register_runtime
from . import onnx
from .exporting import FORMATS, floats_of, write
from .int8 import TensorBatches, quantise


def _prepare(format: str, kernels: bool | None, model: nn.Module, images: Tensor, precision: str = "fp32") -> Call:
    """int8 is calibrated on noise: for latency, which does not depend on the values."""
    module = FORMATS[format]
    with tempfile.TemporaryDirectory(prefix="attendless-") as folder:
        file = Path(folder) / f"model{module.SUFFIX}"
        write(model, file, batch=len(images), format=format, kernels=kernels)
        if precision == "int8":
            noise = torch.randn(4 * len(images), *images.shape[1:], generator=torch.Generator().manual_seed(0))
            quantise(format, file, TensorBatches(noise, len(images)), quiet=True)
        run = module.open_raw(file, floats=floats_of(format, precision))
    return partial(run, images.clone())


for _name, _module in FORMATS.items():
    register_runtime(Runtime(_name, partial(_prepare, _name, None), _module.unavailable, _module.PRECISIONS))
register_runtime(
    Runtime("onnx-kernels", partial(_prepare, "onnx", True), lambda: onnx.unavailable() or onnx.kernels_unavailable())
)
