"""An opened model, with one interface for all runtimes.

run = open_runner("fast.onnx")                        # or .xml, .pt2, a model's name, a file that `save` wrote
logits = run(images)                                  # [B, C, H, W] → [B, classes]
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..convert import open_model
from ..errors import UserError, unknown
from ..measure.precision import check_precision
from ..sizes import parse_size, size_text
from . import onnx, openvino, pt2
from .description import Description, describe
from .features import outputs_of
from .folder import deployed

#: Images in, every output out.
Run = Callable[[Tensor], tuple[Tensor, ...]]
#: The ending of an exported file, and the function that opens it: `(path, threads) -> (run, description)`.
OPENERS: dict[str, tuple[str, Callable[[Path, int | None], tuple[Run, Description]]]] = {
    ".onnx": ("onnx", onnx.open_file),
    ".xml": ("openvino", openvino.open_file),
    ".pt2": ("pt2", pt2.open_file),
}


@dataclasses.dataclass(frozen=True)
class Runner:
    """An opened model. `batch` is the number of images per call; None: any number."""

    runtime: str
    description: Description
    run: Run

    @property
    def size(self) -> tuple[int, int]:
        return self.description.size

    @property
    def channels(self) -> int:
        return self.description.channels

    @property
    def batch(self) -> int | None:
        return self.description.batch

    def __call__(self, images: Tensor | NDArray[Any]) -> Tensor:
        """Normalised images, a tensor or NumPy array → logits [B, classes], or the last feature map [B, C, h, w]."""
        return self.outputs(images)[-1]

    def outputs(self, images: Tensor | NDArray[Any]) -> tuple[Tensor, ...]:
        """Every output: one, or the feature maps of a hierarchical model, the finest first."""
        images = _tensor(images)
        expected = (self.channels, *self.size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected or not len(images):
            raise UserError(f"images of shape {list(images.shape)} were given, [batch, {str(expected)[1:-1]}] expected")
        if self.batch is not None and len(images) != self.batch:
            raise UserError(f"{len(images)} images were given; this file takes exactly {self.batch} at once")
        return self.run(images.float())


def _tensor(images: object) -> Tensor:
    """Images of any floating type as a tensor."""
    found = (
        torch.from_numpy(images.copy()) if isinstance(images, numpy.ndarray) and images.dtype.kind in "fiub" else images
    )
    if not isinstance(found, Tensor):
        raise UserError(f"images were given as {type(images).__name__}: expected a tensor or a NumPy array of floats")
    if not found.is_floating_point():
        raise UserError(
            f"images of {found.dtype} were given: expected floats, normalised with the description's mean and std"
        )
    return found


def open_runner(
    model: str | Path,
    *,
    runtime: str | None = None,
    precision: str | None = None,
    weights: str | Path | None = None,
    size: int | tuple[int, int] | str | None = None,
    attention: str | None = None,
    tokens: str | None = None,
    threads: int | None = None,
    features: bool = False,
    **opening: Any,
) -> Runner:
    """Open an exported file, or any MODEL that `open_model` takes, with the same options, to run `eager` or `compile`.

    The weights, size, attention, tokens and precision of an exported file are fixed, and its ending determines its
    runtime. A folder that `optimize` wrote is the file that its manifest names. `precision` is fp32 or bf16 for
    models that PyTorch runs. `threads` applies to this model in ONNX Runtime and OpenVINO, in PyTorch to the process.
    """
    if (found := deployed(model)) is not None:
        model = found.file
        if model.suffix not in OPENERS:
            runtime, precision = runtime or found.runtime, precision or found.precision
    path = Path(model)
    asked = {"weights": weights, "attention": attention, "tokens": tokens, **opening}
    if path.suffix in OPENERS:
        if not path.is_file():
            raise UserError(f"{str(model)!r}: no such file")
        own, opener = OPENERS[path.suffix]
        _check_fixed(path, own, runtime, {name: value for name, value in asked.items() if value})
        run, description = opener(path, threads)
        if size is not None and parse_size(size) != description.size:
            given, made = size_text(parse_size(size)), size_text(description.size)
            raise UserError(f"{str(model)!r} was exported for {made} px and takes no other size, such as {given}")
        if precision not in (None, description.precision):
            raise UserError(
                f"{str(model)!r} computes in {description.precision}, not in {precision}: export it again with "
                f"--precision {precision}"
            )
        return Runner(own, description, run)
    if runtime not in (None, "eager", "compile"):
        if runtime not in {name for name, _ in OPENERS.values()}:
            raise unknown("runtime", str(runtime), ("eager", "compile", *(name for name, _ in OPENERS.values())))
        raise UserError(f"{str(model)!r} is not an exported file: `attendless export` makes one for {runtime}")
    if threads:
        torch.set_num_threads(threads)
    opened = open_model(model, size=size, **asked)
    return as_runner(opened, runtime or "eager", name=str(model), features=features, precision=precision or "fp32")


def as_runner(
    model: nn.Module,
    runtime: str = "eager",
    *,
    name: str | None = None,
    features: bool = False,
    precision: str = "fp32",
) -> Runner:
    """A model in memory as a runner, in PyTorch: `eager` or `compile`, in fp32 or, as a copy of it, in bf16."""
    check_precision(precision, f"PyTorch ({runtime})", ("fp32", "bf16"))
    about = describe(model, name=name, features=features)
    type_of_images = torch.bfloat16 if precision == "bf16" else torch.float32
    if precision == "bf16":
        model, about = copy.deepcopy(model).bfloat16(), dataclasses.replace(about, floats=precision)
    module = outputs_of(model, features=features)
    called = torch.compile(module, dynamic=False) if runtime == "compile" else module

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return tuple(output.float() for output in called(images.to(type_of_images)))

    return Runner(runtime, about, run)


def _check_fixed(path: Path, own: str, runtime: str | None, asked: dict[str, Any]) -> None:
    if asked:
        raise UserError(f"{str(path)!r} is exported and takes no other {' or '.join(asked)}: export it again with it")
    if runtime not in (None, own):
        raise UserError(f"{str(path)!r} runs in {own}, not in {runtime}")
