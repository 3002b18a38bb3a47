"""An exported file as a module, for `eval` and `bench`, and the original model that its description names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..convert import open_model
from ..errors import UserError
from ..measure.clock import Call, Comparison, interleave
from ..measure.measurement import made_of, verdict
from ..measure.subject import attention_of, converted, original, tokens_of
from ..measure.timing import Conditions, check_answer
from ..sizes import input_size
from ..stamp import stamp
from .checks import images_like
from .description import Description
from .folder import model_file
from .runner import OPENERS, Run, as_runner, open_runner

_FILE, _ORIGINAL = "file", "original"


def is_exported(model: str | Path) -> bool:
    """Whether MODEL is named as an exported file is, or a folder that holds one."""
    return Path(model_file(model)).suffix in OPENERS


class FileModel(nn.Module):
    """A runtime's model as a module: it takes batches of any number and returns logits.

    timm reads classes and preprocessing from `num_classes` and `pretrained_cfg`, as from its own models.
    """

    def __init__(self, run: Run, description: Description, runtime: str = "") -> None:
        super().__init__()
        self.run, self.description, self.runtime = run, description, runtime
        self.num_classes = description.classes
        self.pretrained_cfg = {**description.data_config(), "num_classes": description.classes}
        self.pretrained_cfg |= {"label_names": description.class_names} if description.class_names else {}
        self.default_cfg = self.pretrained_cfg
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        fixed = self.description.batch or len(images)
        missing = -len(images) % fixed
        filled = torch.cat([images, images[-1:].expand(missing, -1, -1, -1)])
        answers = [self.run(part.clone())[-1] for part in filled.split(fixed)]
        return torch.cat(answers)[: len(images)]

    @property
    def label(self) -> str:
        return made_of(self.description.attention, self.description.tokens)

    @property
    def precision(self) -> str:
        return self.description.precision


def open_file_model(path: str | Path, *, threads: int | None = None, **asked: Any) -> FileModel:
    """Open an exported file in the runtime it is for. `asked` are the options of `open_runner` that a file refuses."""
    runner = open_runner(path, threads=threads, **asked)
    if runner.description.features:
        raise UserError(f"{str(path)!r} returns feature maps, not logits: export it again without --features")
    return FileModel(runner.run, runner.description, runner.runtime)


def in_precision(model: nn.Module, precision: str) -> FileModel:
    """A model that eager PyTorch runs in another precision."""
    runner = as_runner(model, precision=precision)
    return FileModel(runner.run, runner.description, runner.runtime)


def original_of(
    about: Description, *, weights: str | Path | None = None, pretrained: bool = False, trained: bool = True
) -> tuple[nn.Module | None, str]:
    """The original model that a description names, and the reason if there is none.

    Args:
        about: the description of an exported file; it names a model that timm knows, or the saved file it is made from.
        weights, pretrained: as in `open_model`, for the original; an exported file holds weights in its own form only.
        trained: whether random weights are refused; latency does not depend on them.
    """
    named = timm.is_model(about.model)
    if not named and not (about.model.endswith(".safetensors") and Path(about.model).is_file()):
        return None, f"it was exported from {about.model!r}, which is neither a registered model nor a file here"
    if named and trained and not (weights or pretrained):
        return None, f"the weights of {about.model} are not known: give --weights F or --pretrained"
    model = open_model(about.model, size=about.size, weights=weights, pretrained=pretrained)
    if not named and (attention_of(model), tokens_of(model)) != (about.attention, about.tokens):
        return None, f"{about.model!r} is another model now: {made_of(attention_of(model), tokens_of(model))}"
    found = original(model) if converted(model) else model
    if input_size(found) != about.size:
        return None, f"{about.model!r} takes {input_size(found)} px, the file {about.size}"
    return found.eval(), ""


# Latency -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FileBench:
    """The latency of an exported file and, if its description names the original model, that of the original in eager
    PyTorch with the paired comparison of both. `why` says why there is no comparison."""

    file: FileModel
    batch: int
    latency_ms: float
    original_ms: float | None
    compared: Comparison | None
    why: str
    seed: int
    stamp: dict[str, Any]

    @property
    def verdict(self) -> str:
        return f"not compared: {self.why}" if self.compared is None else verdict(self.compared)

    def as_dict(self) -> dict[str, Any]:
        about, compared = self.file.description, self.compared
        return {
            "model": about.model,
            "attention": about.attention,
            "tokens_spec": about.tokens or None,
            "size": list(about.size),
            "batch": self.batch,
            "runtime": self.file.runtime,
            "precision": self.file.precision,
            "latency_ms": self.latency_ms,
            "dense_latency_ms": self.original_ms,
            "speedup": None if compared is None else compared.ratio,
            "spread": None if compared is None else compared.spread,
            "quartiles": None if compared is None else list(compared.quartiles),
            "pairs": None if compared is None else compared.pairs,
            "distinguishable": None if compared is None else compared.distinguishable,
            "verdict": self.verdict,
            "seed": self.seed,
        }


def bench_file(path: str | Path, how: Conditions, **asked: Any) -> FileBench:
    """Time an exported file, interleaved with the original model in eager PyTorch where the description names it."""
    file = open_file_model(path, threads=how.threads, **asked)
    about = file.description
    if about.batch not in (None, how.batch):
        raise UserError(f"--batch {how.batch}: {str(path)!r} takes {about.batch} images at once")
    baseline, why = original_of(about, trained=False)
    images = images_like(about, how.batch, how.seed)
    models: dict[str, nn.Module] = {_FILE: file} | ({} if baseline is None else {_ORIGINAL: baseline})

    def calling(model: nn.Module) -> Call:
        def call() -> object:
            with torch.inference_mode():
                return model(images)

        return call

    calls = {name: calling(model) for name, model in models.items()}
    for name, call in calls.items():
        check_answer(call(), f"the {name}")
    how.progress(f"timing {len(calls)} models")
    timings = interleave(calls, budget=how.budget, seed=how.seed)
    return FileBench(
        file=file,
        batch=how.batch,
        latency_ms=1e3 * timings.median(_FILE),
        original_ms=None if baseline is None else 1e3 * timings.median(_ORIGINAL),
        compared=None if baseline is None else timings.compare(_FILE, _ORIGINAL),
        why=why,
        seed=how.seed,
        stamp=stamp(),
    )
