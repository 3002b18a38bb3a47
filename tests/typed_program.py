"""A user's program with every public name, for a type checker: `make lint` checks it with `mypy --strict`.

`assert_type` fails if a function returns `Any`. The program is not run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import timm
from PIL import Image
from torch import Tensor, nn
from typing_extensions import assert_type

import attendless
from attendless import (
    Attention,
    Backbone,
    Backend,
    Case,
    Columnar,
    Context,
    Exported,
    Grid,
    Macs,
    Map,
    Measurement,
    Optimized,
    Options,
    Pyramid,
    Reducer,
    Report,
    SearchSpace,
    Spec,
    Tuned,
    UserError,
    option,
)
from attendless.measure.runtime_table import Table

# Extensions --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeanOptions(Options):
    share: float = option(0.5, "share of the mean", low=0, high=1)


@attendless.register
class Mean(Attention):
    """A mean over all values."""

    name: ClassVar[str] = "typed_mean"
    Options = MeanOptions

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        return v.mean(2, keepdim=True).expand_as(v), context

    def core_macs(self, grid: Grid) -> int:
        return grid.tokens


@attendless.register_reducer
class Nothing(Reducer):
    """A reducer that removes nothing."""

    name: ClassVar[str] = "typed_nothing"
    search_space: ClassVar[SearchSpace | None] = None

    def macs(self, grid: Grid) -> Macs:
        return Macs(other=grid.patches)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        return x, context


@attendless.register_backend
class Mine(Backend):
    op, name, about = "gather", "typed", "a backend that computes nothing"

    def refuses(self, case: Case) -> str:
        return f"{case.heads} heads" if case.heads > 8 else ""

    def macs(self, case: Case) -> int:
        return case.dim


# Models ------------------------------------------------------------------------------------------------------------


def convert_and_save(path: Path) -> nn.Module:
    model: nn.Module = timm.create_model("deit_tiny_patch16_224")
    fast = assert_type(attendless.convert(model, "foveal:keep=0.1", tokens="tome:r=8", readout=True), nn.Module)
    fast, report = attendless.convert_with_report(model, "foveal", layers="2:")
    assert_type(report, Report)
    attendless.save(fast, path, report=report)
    assert_type(attendless.patch(model, "foveal"), Report)
    assert_type(attendless.unpatch(model), int)
    assert_type(attendless.open_model("deit_tiny_patch16_224", size=384), nn.Module)
    assert_type(attendless.push_to_hub(fast, "./folder", measurements=attendless.bench(fast)), str)
    assert_type(attendless.from_hub("./folder"), nn.Module)
    return assert_type(attendless.load(path), nn.Module)


def narrow(model: nn.Module, images: Tensor) -> Tensor:
    if isinstance(model, Columnar):
        assert_type(model.attention, str)
        assert_type(model.grid(), Grid)
    if isinstance(model, Pyramid):
        assert_type(model.grids(), list[Grid])
    if isinstance(model, Backbone):
        assert_type(model.tokens, str)
        return model.forward_context(images)[0]
    raise UserError(f"{type(model).__name__} is no backbone; this is attendless {attendless.__version__}")


# Measurements ------------------------------------------------------------------------------------------------------


def measure(model: nn.Module, images: Tensor) -> float:
    found = assert_type(attendless.bench(model, size=224, batch=4), Measurement)
    assert_type(attendless.bench(model, runtimes=["eager", "onnx"]), Table)
    tuned = assert_type(attendless.tune(model, images, max_drop=1.0), Tuned)
    assert_type(tuned.convert(model), nn.Module)
    optimized = assert_type(attendless.optimize(model, images, max_drop=1.0), Optimized)
    assert_type(optimized(images), Tensor)
    maps = assert_type(attendless.maps(model, images, layers=-1, query=(3, 4)), list[Map])
    assert_type(maps[0].on_grid(), Tensor)
    assert_type(attendless.export(model, "fast.onnx"), Exported)
    return assert_type(found.speedup, float)


def look_up(plugin: Path) -> None:
    attendless.load_plugin(plugin)
    layer = assert_type(attendless.create("foveal", 64, 4, grid=Grid(8, 8, 1)), Attention)
    assert_type(layer.spec, Spec)
    assert_type(attendless.attentions(), dict[str, type[Attention]])
    assert_type(attendless.reducers(), dict[str, type[Reducer]])
    for verdict in attendless.check("foveal"):
        print(verdict)
    with attendless.execution("off"):
        print(layer)


# Other libraries and tasks -----------------------------------------------------------------------------------------


def hugging_face(model: nn.Module) -> None:
    assert_type(attendless.huggingface.register("foveal"), str)
    attendless.huggingface.watch(model)
    attendless.huggingface.unwatch(model)
    assert_type(attendless.huggingface.close(model), int)
    attendless.register_family("mine", "MyAttention", prefix=1)


def detect(image: Image.Image, data: Path) -> Mapping[str, Any]:
    attendless.dense.train("deit_tiny_patch16_224", data, task="detection", epochs=1)
    features = attendless.dense.extractor("deit_tiny_patch16_224")
    model = attendless.dense.build(features.backbone, "retinanet", 2)
    assert_type(model, attendless.dense.Dense)
    attendless.dense.load_mmseg(model, data / "upernet.pth")
    print(attendless.dense.predict(model, image).as_dict())
    return attendless.dense.evaluate(model, data)
