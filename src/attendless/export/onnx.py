"""ONNX: standard operators, so that it runs anywhere; opened by ONNX Runtime."""

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
    check_seal(path)
    session = session_of(path, threads)
    found = description.read(session.get_modelmeta().custom_metadata_map.get(KEY), path)
    return runs(session), found


def session_of(path: Path, threads: int | None = None) -> Any:
    runtime = need("onnx", "onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever is wrong in the file, each in a class of its own
        raise UserError(f"{str(path)!r} cannot be opened by ONNX Runtime: {_first_line(error)}") from None


def runs(session: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(None, {name: images.numpy()})))

    return run


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
