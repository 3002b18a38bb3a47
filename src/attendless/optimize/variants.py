"""Variants: a change of a model in one runtime and precision, prepared as it will be deployed.

A variant in ONNX Runtime or OpenVINO is a file, written by the same code as `attendless export` uses and opened again.
Files stay in a folder, so that a search that resumes does not write them twice and the chosen one can be saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from ..errors import UserError, unknown
from ..export.description import Description, describe
from ..export.exporting import FORMATS, floats_of, write
from ..export.file_model import FileModel
from ..export.int8 import TensorBatches, quantise
from ..export.runner import as_runner
from ..measure.precision import PRECISIONS, check_precisions, unsupported
from ..measure.runtime import find_runtimes
from .candidates import Change

#: Runtime → the format of its files, empty for PyTorch, and whether they use our kernels (None: where available).
_FORMATS: dict[str, tuple[str, bool | None]] = {
    "eager": ("", None),
    "compile": ("", None),
    "onnx": ("onnx", False),
    "onnx-kernels": ("onnx", True),
    "openvino": ("openvino", None),
}
#: The runtimes of a search unless others are given, those that are mostly fastest first. Compiling takes minutes for
#: each variant.
RUNTIMES = ("eager", "openvino", "onnx-kernels", "onnx")


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a model runs: a runtime and a precision."""

    runtime: str = "eager"
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.runtime} {self.precision}"

    @property
    def format(self) -> str:
        """The format of its files; empty for PyTorch."""
        return _FORMATS[self.runtime][0]

    @property
    def module(self) -> ModuleType:
        return FORMATS[self.format]


#: The original model as PyTorch runs it, which all others are compared with.
EAGER = Target()


def targets(runtimes: Sequence[str] | None, precisions: Sequence[str] | None) -> tuple[list[Target], list[str]]:
    """The targets of a search, eager fp32 first, and the reasons why others were left out.

    A runtime or precision that is asked for by name and exists nowhere here raises `UserError`.
    """
    found, reasons = [EAGER], list[str]()
    check_precisions(precisions or ())
    for runtime in runtimes or RUNTIMES:
        if runtime not in _FORMATS:
            raise unknown("runtime", runtime, _FORMATS)
        try:
            (known,) = find_runtimes([runtime])
        except UserError as error:
            if runtimes:
                raise
            reasons.append(str(error))
            continue
        for precision in precisions or PRECISIONS:
            target = Target(runtime, precision)
            why = unsupported(precision, runtime, known.precisions)
            if not why:
                found.append(target)
            elif precision in known.precisions or precisions:
                reasons.append(f"{target}: {why}")
    if runtimes is None and Target("onnx-kernels") in found:  # with our kernels, ONNX Runtime is not slower
        found.remove(Target("onnx"))
    found = list(dict.fromkeys(found))
    if precisions and not any(one.precision in precisions for one in found[1:] or found):
        raise UserError(f"nothing can run in {' or '.join(precisions)} here: {'; '.join(reasons)}")
    return found, list(dict.fromkeys(reasons))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change of the model, and where the changed model runs."""

    change: Change
    target: Target

    def __str__(self) -> str:
        return f"{self.change if self.change else 'unmodified'} in {self.target}"

    @property
    def key(self) -> str:
        """A short name for files."""
        return hashlib.blake2b(str(self).encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A variant that is ready to run.

    run: images of any number → outputs.
    once: a single forward pass of the batch that the file takes, as it is timed.
    file: the variant's file, if it has one.
    """

    run: Callable[[Tensor], Tensor]
    once: Callable[[Tensor], object]
    file: Path | None = None


class Workshop:
    """Prepares the variants of one model.

    Args:
        model: the original model.
        build: a change → the changed model.
        batch: images per forward pass of the files.
        calibration: images to calibrate int8 on.
        folder: where files stay.
    """

    def __init__(
        self, model: nn.Module, build: Callable[[Change], nn.Module], batch: int, calibration: Tensor, folder: Path
    ) -> None:
        self.model, self.build, self.batch, self.calibration, self.folder = model, build, batch, calibration, folder

    def module(self, change: Change) -> nn.Module:
        return self.build(change).eval() if change else self.model

    def prepare(self, variant: Variant) -> Prepared:
        """Write and open the variant's file, or take the one that was written before."""
        target, module = variant.target, self.module(variant.change)
        if not target.format:
            runner = as_runner(module, target.runtime, precision=target.precision)
            return Prepared(partial(_last, runner.run), runner.run)
        folder = self.folder / f"{target.runtime}-{target.precision}-{variant.key}"
        file = folder / f"model{target.module.SUFFIX}"
        if not file.is_file():
            self._write(module, target, folder)
        run = target.module.open_raw(file, floats=floats_of(target.format, target.precision))
        return Prepared(FileModel(run, self.describe(variant)), run, file)

    def describe(self, variant: Variant) -> Description:
        """The description that the variant's file gets when it is saved."""
        about = describe(self.module(variant.change), batch=self.batch)
        if not (target := variant.target).format:
            return about
        floats = floats_of(target.format, target.precision)
        return dataclasses.replace(about, int8=target.precision == "int8", floats=floats)

    def _write(self, module: nn.Module, target: Target, folder: Path) -> None:
        """Write the file in a temporary folder, which then gets its name: a killed search leaves no partial file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=self.folder, prefix=".writing-"))
        try:
            file = temporary / f"model{target.module.SUFFIX}"
            write(module, file, batch=self.batch, format=target.format, kernels=_FORMATS[target.runtime][1])
            if target.precision == "int8":
                quantise(target.format, file, TensorBatches(self.calibration, self.batch))
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _last(run: Callable[[Tensor], tuple[Tensor, ...]], images: Tensor) -> Tensor:
    with torch.inference_mode():
        return run(images)[-1].float()
