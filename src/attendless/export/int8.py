"""Linear layers in 8-bit integers, by each runtime's own tool: NNCF for OpenVINO, onnxruntime.quantization for ONNX.

Projections, MLPs and classifier are quantised, weights and activations. The attention between them, and the kernels of
attendless, compute in fp32. The accuracy drop is measured against the original fp32 model, on images that took no part
in calibration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import open_data
from ..data.held_out import Part, hold_out
from ..data.labels import NO_LABELS, match_labels
from ..data.preprocessing import evaluation_transform
from ..data.source import BadImage, Source
from ..errors import UserError
from ..measure.accuracy import evaluate, load_images, spread
from . import int8_onnx, int8_openvino
from .description import Description
from .file_model import FileModel
from .int8_settings import Calibration, Int8
from .runner import Run

#: The most images that ranges of activations are taken from: NNCF's default. With 100 the drop is larger.
CALIBRATION = 300
#: How layers are quantised unless it is said.
DEFAULT = Int8()
#: Images on which the outputs of the file are compared with those of the model.
COMPARED = 32


@dataclasses.dataclass(frozen=True)
class Quality:
    """The quantised file against the original fp32 model, on images that took no part in calibration.

    images, calibration_images: how many images were measured on, and how many it was calibrated on.
    agreement: fraction of the images with the original's prediction.
    top1, original_top1, float_top1: accuracy in percent of the file, of the original model, and of the converted model
        before quantisation; None without labels.
    difference, difference_ci: top-1 of the file minus the original's in percentage points, with its 95 % interval.
    """

    images: int
    calibration_images: int
    agreement: float
    top1: float | None = None
    original_top1: float | None = None
    float_top1: float | None = None
    difference: float | None = None
    difference_ci: tuple[float, float] | None = None

    def __str__(self) -> str:
        where = f"on {self.images:,} images, calibrated on {self.calibration_images:,} others"
        text = f"top-1 agreement with the original fp32 model {100 * self.agreement:.1f} % {where}"
        if self.top1 is None or self.difference_ci is None:
            return text
        low, high = self.difference_ci
        return (
            f"top-1 {self.top1:.2f} %, original fp32 model {self.original_top1:.2f} %: {self.difference:+.2f} points "
            f"(95 % {low:+.2f} to {high:+.2f}), before quantisation {self.float_top1:.2f} %; {text}"
        )


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of a data set: those to calibrate on, and all others. They are read when they are needed."""

    about: Description
    calibration: Part
    rest: Source

    def compared(self) -> Tensor:
        """Some images for the comparison of outputs."""
        return load_images(self.calibration, evaluation_transform(self.about.data_config()), COMPARED)

    def batches(self, most: int = CALIBRATION) -> Batches:
        return Batches(self, most)


@dataclasses.dataclass(frozen=True)
class TensorBatches:
    """Preprocessed images in memory, in batches of `batch`."""

    images: Tensor
    batch: int

    @property
    def available(self) -> int:
        return len(self.images)

    def __len__(self) -> int:
        return self.available // self.batch

    def __iter__(self) -> Iterator[Any]:
        whole = self.images[: len(self) * self.batch].float()
        return (part.numpy() for part in whole.split(self.batch))


@dataclasses.dataclass(frozen=True)
class Batches:
    """Up to `most` images to calibrate on, in the batches that a file takes, as arrays."""

    images: Images
    most: int

    @property
    def available(self) -> int:
        return len(self.images.calibration)

    @property
    def batch(self) -> int:
        return self.images.about.batch or 1

    def __len__(self) -> int:
        return min(self.most, self.available) // self.batch

    def __iter__(self) -> Iterator[Any]:
        source, batch = self.images.calibration, self.batch
        transform = evaluation_transform(self.images.about.data_config())
        waiting: list[Tensor] = []
        for index in spread(len(source), self.most):
            with contextlib.suppress(BadImage):
                waiting.append(transform(source[index][0]))
            if len(waiting) == batch:
                yield torch.stack(waiting).numpy()
                waiting = []


def check(
    format: str, data: str | Path | None, kernels: bool | None = None, calibration: str | Path | None = None
) -> None:
    """Raise where nothing could be quantised."""
    if format == "onnx" and kernels:
        raise UserError(
            "int8 and our kernels do not go together in ONNX, whose tool opens a model without them: use openvino"
        )
    if format == "pt2":
        raise UserError("int8 is for onnx and openvino: attendless knows no tool that does it for pt2")
    if data is None:
        raise UserError("int8 is calibrated on images: give some with --data (data=)")
    if calibration is not None and Path(calibration).resolve() == Path(data).resolve():
        raise UserError(
            f"--calibration and --data are both {str(data)!r}: accuracy is measured on other images than those of the "
            "calibration; leave --calibration out, and part of --data is held out for it"
        )


def images(about: Description, data: str | Path, calibration: str | Path | None = None) -> Images:
    """Open a data set. Without a `calibration` set of its own, part of it is held out by a hash of the file names."""
    try:
        whole = open_data(data)
    except UserError:  # no labels, which only accuracy needs
        whole = open_data(data, labels=False)
    if calibration is None:
        held, rest = hold_out(whole, CALIBRATION)
        return Images(about, held if len(held) else rest, rest)
    apart = open_data(calibration, labels=False)
    return Images(about, Part(apart, spread(len(apart), CALIBRATION)), whole)


def quantise(format: str, path: Path, batches: Calibration, how: Int8 = DEFAULT, *, quiet: bool = False) -> None:
    """Quantise a file in its place. `quiet`: without the progress bars of the tools, which go to standard error."""
    if not len(batches):
        raise UserError(
            f"{batches.available} images to calibrate on, and the file takes {batches.batch} at once: give more "
            "images, twice as many without --calibration"
        )
    tools = {"onnx": int8_onnx.quantise, "openvino": int8_openvino.quantise}
    with (
        contextlib.redirect_stdout(io.StringIO() if quiet else sys.stderr),
        warnings.catch_warnings(),
    ):  # their bars and their advice
        warnings.simplefilter("ignore")
        tools[format](path, batches, how)


def quality(
    plain: Run,
    quantised: Run,
    model: nn.Module,
    original: nn.Module,
    given: Images,
    limit: int | None,
    say: Callable[[str], None],
) -> Quality | None:
    """Measure the file before and after quantisation, and the original model, on images outside of calibration.

    Feature maps have no predictions to count, and a single image leaves none to measure on.
    """
    about = given.about
    if about.features or given.rest is given.calibration:
        return None
    say("measuring accuracy")
    labels = NO_LABELS
    with contextlib.suppress(UserError):  # without labels, or with those of other classes, agreement alone is measured
        labels = match_labels(given.rest.classes, model)
    transform = evaluation_transform(about.data_config())
    runs: dict[str, nn.Module] = {"f32": FileModel(plain, about), "int8": FileModel(quantised, about)}
    found = evaluate(
        original,
        runs | {"original": original},
        given.rest,
        transform,
        labels=labels,
        limit=limit,
        batch=about.batch or 16,
    )
    ours = found["int8"]
    return Quality(
        images=ours.images,
        calibration_images=len(given.batches()) * (about.batch or 1),
        agreement=ours.agreement,
        top1=ours.top1,
        original_top1=found["original"].top1,
        float_top1=found["f32"].top1,
        difference=ours.difference,
        difference_ci=ours.difference_ci,
    )
