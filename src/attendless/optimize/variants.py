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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from ..errors import UserError, unknown
from ..export import int8_openvino
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
    """Where a model runs: a runtime, a precision, and for int8 further layers that are quantised at run time."""

    runtime: str = "eager"
    precision: str = "fp32"
    dynamic: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.runtime} {self.precision_text}"

    @property
    def precision_text(self) -> str:
        return f"{self.precision}, {len(self.dynamic)} more layers dynamic" if self.dynamic else self.precision

    @property
    def kernels(self) -> bool | None:
        """Whether its files use our kernels; None: where available."""
        return _FORMATS[self.runtime][1]

    @property
    def format(self) -> str:
        """The format of its files; empty for PyTorch."""
        return _FORMATS[self.runtime][0]

    @property
    def module(self) -> ModuleType:
        return FORMATS[self.format]


#: The original model as PyTorch runs it, which all others are compared with.
EAGER = Target()


def targets(
    runtimes: Sequence[str] | None, precisions: Sequence[str] | None, *, quick: bool = False
) -> tuple[list[Target], list[str]]:
    """The targets of a search, eager fp32 first, and the reasons why others were left out.

    A quick search takes the runtime that is mostly fastest, of those that are installed.

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
    if quick and runtimes is None:
        fastest = next((one.runtime for one in found[1:] if one.runtime != EAGER.runtime), EAGER.runtime)
        found = [one for one in found if one.runtime in (EAGER.runtime, fastest)]
    if runtimes is None and Target("onnx-kernels") in found:  # with our kernels, ONNX Runtime is not slower
        found = [one for one in found if one != Target("onnx")]
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
        """A short name for files and logs."""
        text = " ".join([str(self), *self.target.dynamic])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def source(self) -> Variant | None:
        """The variant whose file this one's is made of: the file before quantisation or before more layers became
        dynamic. None if the file is written from the model."""
        runtime, precision = self.target.runtime, self.target.precision
        if precision == "fp32" or not self.target.format:
            return None
        return Variant(self.change, Target(runtime, "int8") if self.target.dynamic else Target(runtime))


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
        calibrated: the change whose int8 file in OpenVINO is calibrated on images; the files of all other changes take
            its ranges, which saves half a minute each. None: every file is calibrated.
    """

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[Change], nn.Module],
        batch: int,
        calibration: Tensor,
        folder: Path,
        calibrated: Change | None = None,
    ) -> None:
        self.model, self.build, self.batch, self.calibration, self.folder = model, build, batch, calibration, folder
        self.calibrated = calibrated

    def module(self, change: Change) -> nn.Module:
        return self.build(change).eval() if change else self.model

    def prepare(self, variant: Variant) -> Prepared:
        """Open the variant's file, which is written if it was not before."""
        target = variant.target
        if not target.format:
            runner = as_runner(self.module(variant.change), target.runtime, precision=target.precision)
            return Prepared(partial(_last, runner.run), runner.run)
        file = self.file(variant)
        run = target.module.open_raw(file, floats=floats_of(target.format, target.precision))
        return Prepared(FileModel(run, self.describe(variant)), run, file)

    def file(self, variant: Variant) -> Path:
        """The variant's file, which is written if it was not before."""
        target = variant.target
        folder = self.folder / f"{target.runtime}-{target.precision}-{variant.key}"
        file = folder / f"model{target.module.SUFFIX}"
        if not file.is_file():
            source = None if variant.source is None else self.file(variant.source)
            with _renamed(folder) as temporary:
                self._write(variant, temporary / file.name, source)
        return file

    def hasty(self, variant: Variant, images: int = 4) -> Prepared:
        """An int8 variant that is calibrated on a few images: as fast as with many, and no good for predictions."""
        source, target = self.file(variant.source or variant), variant.target
        with tempfile.TemporaryDirectory(prefix="attendless-") as folder:
            file = Path(folder) / source.name
            _copy(target.module.files(source), file.parent)
            quantise(
                target.format, file, TensorBatches(self.calibration[: images * self.batch], self.batch), quiet=True
            )
            run = target.module.open_raw(file, floats=floats_of(target.format, target.precision))
        return Prepared(FileModel(run, self.describe(variant)), run)

    def describe(self, variant: Variant) -> Description:
        """The description that the variant's file gets when it is saved."""
        about = describe(self.module(variant.change), batch=self.batch)
        if not (target := variant.target).format:
            return about
        floats = floats_of(target.format, target.precision)
        return dataclasses.replace(about, int8=target.precision == "int8", floats=floats)

    def _write(self, variant: Variant, file: Path, source: Path | None) -> None:
        target = variant.target
        if source is None:
            module = self.module(variant.change)
            write(module, file, batch=self.batch, format=target.format, kernels=target.kernels)
            return
        _copy(target.module.files(source), file.parent)
        if target.dynamic:
            plain = self.file(Variant(variant.change, Target(target.runtime)))
            int8_openvino.make_dynamic(file, plain, target.dynamic)
        elif target.precision == "int8" and not self._quantise_like(variant, file):
            quantise(target.format, file, TensorBatches(self.calibration, self.batch), quiet=True)

    def _quantise_like(self, variant: Variant, file: Path) -> bool:
        """Quantise a file as that of `calibrated` was; returns whether this is possible."""
        if self.calibrated in (None, variant.change) or not variant.change or variant.target.format != "openvino":
            return False
        assert self.calibrated is not None
        like = Variant(self.calibrated, variant.target)
        assert like.source is not None
        return int8_openvino.quantise_like(file, self.file(like), self.file(like.source))


@contextmanager
def _renamed(folder: Path) -> Iterator[Path]:
    """A temporary folder that gets its name at the end: a killed search leaves no partial file."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
    try:
        yield temporary
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        shutil.copy2(file, folder / file.name)


def _last(run: Callable[[Tensor], tuple[Tensor, ...]], images: Tensor) -> Tensor:
    with torch.inference_mode():
        return run(images)[-1].float()
