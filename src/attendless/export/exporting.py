"""`export`: a model as a file for another runtime, checked before it is there.

    attendless.export(model, "fast.onnx")                          # .onnx, .xml (OpenVINO) or .pt2
    attendless.export(model, "fast.xml", precision="int8", data="photos")

Everything is made in a folder beside the target; what passes the check is put in its place by renaming, the file that
is opened last. So there is never a partial file under the final name, whatever happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import open_model
from ..errors import UserError, unknown
from ..integrations.resize import resize
from ..measure.precision import check_precision, no_bf16
from ..measure.subject import converted, original
from ..sizes import channels, input_size, parse_size
from ..storage import sync
from . import (
    checks,
    onnx,
    openvino,
    pt2,
    speed,
)
from . import int8 as quantising
from .checks import Parity
from .description import Description, describe
from .features import outputs_of
from .int8_settings import Calibration
from .packages import versions
from .trace import KERNELS, STANDARD, traced
from .translate import DOMAIN

FORMATS: dict[str, ModuleType] = {"onnx": onnx, "openvino": openvino, "pt2": pt2}
Say = Callable[[str], None]
#: Images that the baseline of a quantised file's latency is calibrated on: its predictions are not used.
_FEW = 16


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of `export`.

    path: the file to open.
    format: `onnx`, `openvino` or `pt2`.
    files: all files that were written.
    description: the description of the model that the file holds.
    parity: the difference to the PyTorch model.
    speed: latencies of the file, of eager PyTorch and of the baseline, if they were timed.
    quality: accuracy before and after quantisation, if the file is quantised.
    operators: the number of operators of each kind.
    notes: further remarks.
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    description: Description
    parity: Parity | None
    speed: speed.Speed | None
    quality: quantising.Quality | None
    operators: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        about = dataclasses.asdict(self.description)
        return {
            "path": str(self.path),
            "format": self.format,
            "files": [str(file) for file in self.files],
            "bytes": self.bytes,
            **{key: about[key] for key in ("model", "attention", "channels", "batch", "features", "kernels", "int8")},
            "precision": self.description.precision,
            "floats": self.description.floats,
            "tokens_spec": about["tokens"] or None,
            "size": list(self.description.size),
            **about["report"],
        }


def export(
    model: nn.Module | str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    size: int | tuple[int, int] | str | None = None,
    batch: int | None = 1,
    features: bool = False,
    precision: str | None = None,
    int8: bool = False,
    data: str | Path | None = None,
    calibration: str | Path | None = None,
    limit: int | None = None,
    kernels: bool | None = None,
    opset: int | None = None,
    measure: bool = True,
    budget: float = 4.0,
    name: str | None = None,
    progress: Say = lambda text: None,
    **opening: Any,
) -> Exported:
    """Write a model to a file for another runtime, and compare the file with the PyTorch model.

    Args:
        model: A model in memory, or a name, file or folder for `open_model`.
        out: The file: `.onnx`, `.xml` (OpenVINO) or `.pt2`.
        format: `onnx`, `openvino` or `pt2`; default: by the ending of `out`.
        size: Input size; default: the model's own.
        batch: Number of images per call; None for any number.
        features: Whether the file also returns feature maps.
        precision: `fp32`, `bf16` (OpenVINO, on a CPU with bf16 instructions) or `int8`: linear layers are quantised;
            the rest of an OpenVINO file then computes in bf16 where the CPU has it.
        int8: The same as `precision="int8"`.
        data: A folder of images, for the comparison and to measure a quantised file on.
        calibration: A folder of images to calibrate int8 on; default: up to 300 of `data`, at most half of them, chosen
            by a hash of their names. Accuracy is measured on the others.
        limit: Number of images on which accuracy is measured; default: all.
        kernels: Whether the file uses attendless's own kernels; default: where the runtime can load them, except in
            ONNX, so that the file runs anywhere.
        opset: The ONNX opset; default: that of the exporter.
        measure: Whether the file is timed.
        budget: Seconds of timing.
        name: The model's name in the file; default: its own.
        progress: Receives a line of text for each step.
        opening: Further arguments of `open_model`, such as `attention`, `tokens` and `weights`.

    Returns:
        The files, the difference to the PyTorch model, speed, size and operators.

    Raises:
        UserError: the model cannot be exported, or the outputs of the file differ. Nothing is written then.
    """
    how = _format(out, format)
    if why := FORMATS[how].unavailable():
        raise UserError(why)
    if precision not in (None, "int8") and int8:
        raise UserError(f"precision={precision} and int8: give one of the two")
    precision = "int8" if int8 else precision or "fp32"
    floats = floats_of(how, precision)
    int8 = precision == "int8"
    if int8:
        quantising.check(how, data, kernels, calibration)
    elif calibration is not None:
        raise UserError("calibration is for int8: give int8=True (--int8) too")
    if opset is not None:
        onnx.check_opset(how, opset)
    if isinstance(model, str | Path):
        name = name or str(model)
        opened: nn.Module = open_model(model, size=size, **opening)
    elif opening:
        raise UserError(f"{', '.join(opening)}: for a model that is opened by name; this one is in memory: convert it")
    elif size is not None and parse_size(size) != input_size(model):
        raise UserError(f"the model is made for {input_size(model)} images, not {parse_size(size)}: resize it first")
    else:
        opened = model
    job = _Job(how, batch, features, opset, kernels, progress, floats)
    return job.run(opened.eval(), Path(out), name, int8, data, calibration, limit, budget if measure else None)


def write(model: nn.Module, file: Path, *, batch: int | None, format: str, kernels: bool | None = None) -> None:
    """Only write it: unchecked, and without a description."""
    job = _Job(format, batch, False, None, kernels, lambda text: None)
    job.write(model, file, job.policy()[0])


def floats_of(format: str, precision: str) -> str:
    """The precision in which a file computes all but its quantised layers: bf16 beside int8 too, where that is fast."""
    known = FORMATS[format].PRECISIONS
    check_precision(precision, format, known)
    free = precision == "int8" and "bf16" in known and not no_bf16()
    return "bf16" if precision == "bf16" or free else "fp32"


def policy_of(format: str, kernels: bool | None = None) -> str:
    """The backend of the operations in a file. `kernels`: whether it is ours; by default if the runtime can load it."""
    module = FORMATS[format]
    if not (module.KERNELS if kernels is None else kernels):
        return STANDARD
    why = module.kernels_unavailable()
    if why and kernels:
        raise UserError(f"the kernels cannot stand beside the model: {why}")
    return STANDARD if why else KERNELS


def _format(out: str | Path, asked: str | None) -> str:
    endings = {module.SUFFIX: name for name, module in FORMATS.items()}
    if asked is not None and asked not in FORMATS:
        raise unknown("format", asked, FORMATS)
    suffix = Path(out).suffix
    if suffix not in endings or (asked is not None and endings[suffix] != asked):
        wanted = {FORMATS[asked].SUFFIX: asked} if asked else endings
        listed = " or ".join(f"{ending} ({name})" for ending, name in wanted.items())
        raise UserError(f"{str(out)!r}: expected a name that ends in {listed}")
    return endings[suffix]


@dataclasses.dataclass(frozen=True)
class _Job:
    """How to export: the same for a model and for the original that it is compared with."""

    format: str
    batch: int | None
    features: bool
    opset: int | None
    kernels: bool | None
    say: Say
    floats: str = "fp32"

    @property
    def module(self) -> ModuleType:
        return FORMATS[self.format]

    def run(
        self,
        model: nn.Module,
        out: Path,
        name: str | None,
        quantise: bool,
        data: str | Path | None,
        calibration: str | Path | None,
        limit: int | None,
        budget: float | None,
    ) -> Exported:
        about = describe(model, name=name, batch=self.batch, features=self.features)
        policy, notes = self.policy()
        images = None if data is None else quantising.images(about, data, calibration)
        compared = None if images is None else images.compared()  # broken images are found before any work
        with _folder_beside(out) as folder:
            file = folder / out.name
            outputs = outputs_of(model, features=self.features)
            self.write(model, file, policy)
            self.say("comparing it with the model")
            run = self.module.open_raw(file)
            parity = checks.compare(run, outputs, about, given=compared)
            if self.floats != "fp32":  # first in fp32, which shows that the graph is right
                run = self.module.open_raw(file, floats=self.floats)
                notes = (*notes, checks.compare_bf16(run, outputs, about, compared))
            quality = None
            if quantise and images is not None:
                self.say("quantising it")
                quantising.quantise(self.format, file, images.batches())
                plain, run = run, self.module.open_raw(file, floats=self.floats)
                baseline = _dense(model, about.size) if converted(model) else model
                quality = quantising.quality(plain, run, model, baseline, images, limit, self.say)
            timed = None
            if budget is not None:
                ranges = images.batches(_FEW) if quantise and images is not None else None
                timed = self.time(model, outputs, run, about, policy, folder, budget, ranges)
            operators = self.module.operators(file)
            ours = any(key.startswith(f"{DOMAIN}.") for key in operators)
            report = {
                "parity": dataclasses.asdict(parity),
                "speed": None if timed is None else dataclasses.asdict(timed),
                "quality": None if quality is None else dataclasses.asdict(quality),
                "operators": operators,
                "notes": list(notes),
            }
            about = dataclasses.replace(
                about, kernels=ours, int8=quantise, floats=self.floats, versions=versions(), report=finite(report)
            )
            self.module.stamp(file, about)
            written = _put(self.module.files(file), out)
        return Exported(out, self.format, tuple(written), about, parity, timed, quality, operators, notes)

    def policy(self) -> tuple[str, tuple[str, ...]]:
        """The backend of the operations in the file, and notes for the user."""
        policy = policy_of(self.format, self.kernels)
        wanted = self.module.KERNELS if self.kernels is None else self.kernels
        why = self.module.kernels_unavailable() if wanted else ""
        return policy, (f"standard operators, not our kernels: {why}",) if why else ()

    def write(self, model: nn.Module, file: Path, policy: str, what: str = "the model") -> None:
        self.say(f"tracing {what}")
        outputs = outputs_of(model, features=self.features)
        program = traced(outputs, channels(model), input_size(model), self.batch, policy, fused=self.format == "pt2")
        self.say(f"writing {what} for {self.format}")
        self.module.write(program, file, opset=self.opset)

    def time(
        self,
        model: nn.Module,
        outputs: nn.Module,
        run: checks.Run,
        about: Description,
        policy: str,
        folder: Path,
        budget: float,
        ranges: Calibration | None,
    ) -> speed.Speed:
        """`ranges`: images to quantise the original model on, if the file is quantised."""
        dense = None
        if converted(model):
            (folder / "dense").mkdir()
            file = folder / "dense" / f"dense{self.module.SUFFIX}"
            self.write(_dense(model, about.size), file, policy, "the original model to compare with")
            if ranges is not None:
                self.say("quantising the original model to compare with")
                quantising.quantise(self.format, file, ranges)
            dense = self.module.open_raw(file, floats=self.floats)

        def eager(images: Tensor) -> tuple[Tensor, ...]:
            with torch.inference_mode():
                return tuple(outputs(images))

        self.say("timing")
        return speed.time(run, eager, dense, about, budget=budget)


def _dense(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    dense = original(model)
    if input_size(dense) != size:
        resize(dense, size)
    return dense.eval()


def finite(found: Any) -> Any:
    """A JSON value with None for what JSON cannot hold."""
    if isinstance(found, Mapping):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return None if isinstance(found, float) and not -float("inf") < found < float("inf") else found


@contextlib.contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A folder on the target's file system, gone afterwards; only a killed process leaves one, with a dot in front.
    Errors of writing that name no file, such as that of a full disk, name `out`."""
    place = Path(os.path.realpath(out)).parent
    place.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=place, prefix=f".{out.name[:50]}."))
    try:
        yield folder
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(out)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(files: list[Path], out: Path) -> list[Path]:
    """Rename files into their place. With several, what is there under the last one's name goes first: better no file
    than one whose other half is of another model."""
    place = Path(os.path.realpath(out)).parent
    targets = [place / file.name for file in files]
    for file in files:
        sync(file)
    if len(files) > 1:
        targets[-1].unlink(missing_ok=True)
    for file, target in zip(files, targets, strict=True):
        file.replace(target)
    sync(place)
    return targets
