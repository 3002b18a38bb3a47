"""Linear layers in 8-bit integers, by each runtime's own tool: NNCF for OpenVINO, onnxruntime.quantization for ONNX.

Projections, MLPs and classifier are quantised, weights and activations; the attention between them, and our kernels,
compute in 32-bit floats. What that does to the answers is measured, not judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import open_data
from ..data.labels import NO_LABELS, match_labels
from ..data.preprocessing import evaluation_transform
from ..errors import UserError
from ..measure.accuracy import evaluate, load_images
from .description import Description
from .packages import need

#: Images the ranges of activations are taken from; the other half of what is loaded joins the check.
IMAGES = 64
Run = Callable[[Tensor], tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Quality:
    """The quantised file against the same file before: on how many images, how often they agree, and, if the images
    have labels, both top-1 in percent, and the difference with its 95 % interval in points."""

    images: int
    agreement: float
    top1: float | None = None
    float_top1: float | None = None
    difference: float | None = None
    difference_ci: tuple[float, float] | None = None

    def __str__(self) -> str:
        text = f"agrees with its 32-bit self on {100 * self.agreement:.1f} % of {self.images:,} images"
        if self.top1 is None or self.difference_ci is None:
            return text
        low, high = self.difference_ci
        return (
            f"top-1 {self.top1:.2f} %, before {self.float_top1:.2f} %: {self.difference:+.2f} points "
            f"(95 % {low:+.2f} to {high:+.2f}); {text}"
        )


def check(format: str, data: str | Path | None, kernels: bool | None = None) -> None:
    """Raise where nothing could be quantised."""
    if format == "onnx" and kernels:
        raise UserError(
            "int8 and our kernels do not go together in ONNX, whose tool opens a model without them: use openvino"
        )
    if format == "pt2":
        raise UserError("int8 is for onnx and openvino: attendless knows no tool that does it for pt2")
    if data is None:
        raise UserError("int8 is calibrated on images: give some with --data (data=)")


def images(model: nn.Module, about: Description, data: str | Path) -> Tensor:
    """Images of a data set, prepared as the model wants them."""
    transform = evaluation_transform(about.data_config())
    return load_images(open_data(data, labels=False), transform, IMAGES)


def quantise(format: str, path: Path, images: Tensor, about: Description) -> None:
    """Quantise a file in its place."""
    tools = {"onnx": _quantise_onnx, "openvino": _quantise_openvino}
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # their bars and their advice
        warnings.simplefilter("ignore")
        tools[format](path, list(_parts(images, about.batch)))


def quality(
    plain: Run,
    quantised: Run,
    model: nn.Module,
    about: Description,
    data: str | Path | None,
    limit: int | None,
    say: Callable[[str], None],
) -> Quality | None:
    """Measure both on the images of `data`; nothing of features, which have no answers to count."""
    if about.features or data is None:
        return None
    say("measuring accuracy")
    source, labels = open_data(data, labels=False), NO_LABELS
    try:
        source = open_data(data)
        labels = match_labels(source.classes, model)
    except UserError:  # without labels, or with those of other classes, agreement alone is measured
        pass
    transform = evaluation_transform(about.data_config())
    batch = about.batch or 16
    runs: dict[str, nn.Module] = {name: _Answers(run, batch) for name, run in (("f32", plain), ("int8", quantised))}
    found = evaluate(runs["f32"], runs, source, transform, labels=labels, limit=limit, batch=batch)
    ours = found["int8"]
    return Quality(ours.images, ours.agreement, ours.top1, found["f32"].top1, ours.difference, ours.difference_ci)


class _Answers(nn.Module):
    """A runner as a module, which is what is evaluated; what is left of a batch is filled up."""

    def __init__(self, run: Run, batch: int) -> None:
        super().__init__()
        self.run, self.batch = run, batch
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        filled = torch.cat([images, images[-1:].expand(self.batch - len(images), -1, -1, -1)])
        return self.run(filled.clone())[-1][: len(images)]


def _parts(images: Tensor, batch: int | None) -> Iterator[Any]:
    """Images in the batches a file takes, as arrays."""
    for part in images.split(batch or 1):
        if len(part) == (batch or 1):
            yield part.contiguous().numpy()


def _quantise_openvino(path: Path, batches: list[Any]) -> None:
    import logging

    nncf, core = need("openvino", "nncf", "openvino"), None
    openvino = need("openvino", "openvino")
    from .openvino import read_with_kernels

    core, model = read_with_kernels(path)
    del core
    nncf.set_log_level(logging.ERROR)
    others = sorted({node.get_type_name() for node in model.get_ops()} - {"MatMul", "Convolution"})
    # Products of two activations are the attention's, those with a constant the layers'.
    inner = [node.get_friendly_name() for node in model.get_ops() if _of_activations(node)]
    ignored = nncf.IgnoredScope(names=inner, types=[kind for kind in others if kind != "Constant"], validate=False)
    quantised = nncf.quantize(
        model,
        nncf.Dataset(batches, lambda batch: batch),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
        ignored_scope=ignored,
    )
    again = path.with_name(f"int8-{path.name}")
    openvino.save_model(quantised, again, compress_to_fp16=False)
    del model, quantised
    again.replace(path)
    again.with_suffix(".bin").replace(path.with_suffix(".bin"))


def _of_activations(node: Any) -> bool:
    if node.get_type_name() != "MatMul":
        return False
    return not any(_constant(node.input_value(i).get_node()) for i in range(2))


def _constant(node: Any) -> bool:
    """Whether a value is known beforehand: a constant, or made of constants alone."""
    inputs = [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return node.get_type_name() == "Constant" or (bool(inputs) and all(map(_constant, inputs)))


def _quantise_onnx(path: Path, batches: list[Any]) -> None:
    import logging

    need("onnx", "onnxruntime", "onnx")
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"images": batch}

    prepared, made = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
    logging.disable(logging.WARNING)
    try:
        quant_pre_process(path, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            made,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm", "Conv"],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    finally:
        logging.disable(logging.NOTSET)
        prepared.unlink(missing_ok=True)
    made.replace(path)
