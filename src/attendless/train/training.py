"""`train`: trains a model with an attention on images by a recipe, and writes weights and metrics to a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.layers import DropPath
from torch import nn

from ..backbones import is_backbone
from ..backbones.weights import start_attentions
from ..convert import open_model
from ..convert.files import plan_of, save
from ..convert.source import random_weights
from ..data.cache import cached
from ..data.opening import open_splits
from ..data.source import Source
from ..errors import UserError, unknown
from ..randomness import WEIGHTS, randomness
from ..sizes import input_size
from ..stamp import stamp
from ..storage import atomic
from .disk import goes_on_later
from .learning import Learning
from .loader import shares, steps_per_epoch
from .log import Log, draw_curves
from .loop import Session
from .objective import Supervised
from .optimise import make_optimizer
from .process import accelerator as make_accelerator
from .process import only_run
from .recipe import Recipe, Run, recipe
from .state import Data, Phase
from .task import Classification, Task
from .worth import slower


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a run.

    out: The output folder.
    finished: False if the run was stopped before its end.
    steps: Optimiser steps done.
    best: The best validation score, or None without an evaluation.
    metrics: The row of the last epoch.
    """

    out: Path
    finished: bool
    steps: int
    best: float | None
    metrics: dict[str, Any]


def train(
    model: str | Path | nn.Module,
    data: str | Path,
    *,
    attention: str | None = None,
    tokens: str | None = None,
    recipe: str | Recipe | None = None,
    out: str | Path = "attendless-out/train",
    weights: str | Path | None = None,
    pretrained: bool = False,
    run: Run | None = None,
    **fields: Any,
) -> Result:
    """Train a classifier on a folder of images. The same call with the same `out` resumes.

    Args:
        model: A model name, the path of a saved file, or a module.
        data: A folder of images with one folder per class, `scenes`, or a torchvision data set as NAME@DIR.
        attention: Attention spec for every layer (default: the model's own).
        tokens: Token reducer spec (default: the model's own). Not for a module: convert it first.
        recipe: Recipe or its name (default: `finetune` for a model with weights, `quick` otherwise).
        out: Folder for weights, metrics, curves and the recipe.
        weights: File with the initial weights.
        pretrained: Download timm's pretrained weights.
        run: Settings that do not change the weights: workers, device, cache, checkpoints.
        fields: Fields of the recipe to replace, such as `epochs=5`.

    Raises:
        UserError: The data has no labels, the classes do not fit, or `out` holds a different run.
    """
    learned = not isinstance(model, nn.Module) and not random_weights(model, weights=weights, pretrained=pretrained)
    name, why = ("finetune", "the model comes with weights") if learned else ("quick", "to start from scratch")
    chosen = settle(recipe or name, fields)
    source, val, note = open_splits(data)
    if not source.classes:
        raise UserError(f"--data {str(data)!r} has images without labels: training needs one folder per class")
    classes = len(source.classes)
    if isinstance(model, nn.Module):
        if tokens is not None:
            raise UserError(f"tokens={tokens!r} is for a model given by its name or file: convert this one first")
        built: Any = model
    else:
        with randomness(WEIGHTS, chosen.seed):
            built = open_model(
                model,
                attention=attention,
                tokens=tokens,
                weights=weights,
                pretrained=pretrained,
                num_classes=classes,
                size=chosen.height_width,
                below_breakeven="keep",
            )
    if getattr(built, "num_classes", classes) != classes:
        raise UserError(f"the model has {built.num_classes} classes, but the data has {classes}")
    set_drop(built, chosen)
    remarks = [] if recipe else [f"recipe {name}, {why}: {chosen.epochs} epochs, lr {chosen.rate():g}"]
    pictures = as_model_wants(built, source, val, chosen, names=tuple(source.classes))
    begin = Begin(built, model_text(model), data, attention, Path(out), run or Run(), note, remarks)
    with goes_on_later(begin.out):
        session = begin.session(Supervised, [Phase("train", chosen, {"label": 1.0, "extra": 1.0})], pictures)
        return finish(session)


def settle(text: str | Recipe, fields: Mapping[str, Any]) -> Recipe:
    """A recipe with some fields replaced; an unknown name raises an error that lists the valid ones."""
    known = [field.name for field in dataclasses.fields(Recipe)]
    for name in fields:
        if name not in known:
            raise unknown("recipe field", name, known)
    return dataclasses.replace(recipe(text), **fields)


def model_text(model: str | Path | nn.Module) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else str(model)


def as_model_wants(
    model: Any, train: Source, val: Source, chosen: Learning, *, names: tuple[str, ...], labelled: bool = True
) -> Data:
    """The data with the image size, mean and standard deviation of the model."""
    config = resolve_model_data_config(model)
    size = chosen.height_width or input_size(model)
    return Data(train, val, size, tuple(config["mean"]), tuple(config["std"]), model.num_classes, labelled, names)


def set_drop(model: nn.Module, chosen: Learning) -> None:
    """Set stochastic depth, increasing with depth, and dropout except on attention maps, by the recipe."""
    if chosen.drop_path:
        places = [m for m in model.modules() if any(hasattr(m, n) for n in ("drop_path", "drop_path1", "drop_path2"))]
        for module, rate in zip(places, torch.linspace(0, chosen.drop_path, len(places)).tolist(), strict=True):
            for name in ("drop_path", "drop_path1", "drop_path2"):
                if hasattr(module, name):
                    setattr(module, name, DropPath(rate) if rate else nn.Identity())
        if is_backbone(model):  # set the drop rate of branches inside attentions too
            start_attentions(model.blocks, scratch=False)
    if chosen.drop:
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and not name.endswith("attn_drop"):
                module.p = chosen.drop


@dataclasses.dataclass
class Begin:
    """The start of a run of `train` or `distill`: processes, output folder, description."""

    model: nn.Module
    name: str
    data: str | Path
    attention: str | None
    out: Path
    run: Run
    #: How the data was split, and further remarks to print at the start.
    note: str
    remarks: Sequence[str] = ()
    #: Further entries of the run's description.
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def session(
        self,
        objective: Callable[[nn.Module, Mapping[str, float]], nn.Module],
        phases: Sequence[Phase],
        data: Data,
        teacher: nn.Module | None = None,
        task: Task | None = None,
    ) -> Session:
        accelerator: Accelerator = make_accelerator(self.run.device)
        main = accelerator.is_main_process
        for phase in phases:  # raise errors before anything is written
            steps_per_epoch(len(data.train), phase.recipe.batch)
            shares(phase.recipe.batch, accelerator.num_processes * phase.recipe.accumulate)
            make_optimizer(self.model, phase.recipe)
        self.out.mkdir(parents=True, exist_ok=True)
        log = Log(self.out, speaks=main, tensorboard=self.run.tensorboard)
        if main:
            check_and_write(self.out / "recipe.json", self._description(phases, data, accelerator))
            pictures = f"{len(data.train)} training images, {len(data.val)} validation images ({self.note})"
            log.say(f"{pictures}; processes: {accelerator.num_processes}, on {accelerator.device.type}")
            for remark in filter(None, (*self.remarks, slower(self.model, data.size))):
                log.say(remark)
        accelerator.wait_for_everyone()
        if self.run.cache:
            with accelerator.main_process_first():
                train, val = (cached(source, self.run.cache, log.say) for source in (data.train, data.val))
            data = dataclasses.replace(data, train=train, val=val)
        write = model_writer(self.model, log.say)
        task = task or Classification(teacher)
        return Session(self.model, objective, phases, data, self.run, self.out, accelerator, log, write, task, teacher)

    def _description(self, phases: Sequence[Phase], data: Data, accelerator: Accelerator) -> dict[str, Any]:
        reducer = getattr(self.model, "tokens", "")
        what = {
            **self.about,
            "model": self.name,
            "attention": self.attention or getattr(self.model, "attention", None),
            **({"tokens": reducer} if reducer else {}),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "pictures": [len(data.train), len(data.val)],
            "classes": data.classes,
            "size": list(data.size),
            "phases": [dataclasses.asdict(phase) | {"losses": dict(phase.losses)} for phase in phases],
        }
        how = {"data": str(self.data), "run": dataclasses.asdict(self.run), "processes": accelerator.num_processes}
        return {"what": what, "how": how, "stamp": stamp(accelerator.device)}


def check_and_write(path: Path, description: dict[str, Any]) -> None:
    """Write the run's description; raises if the folder holds a different run."""
    new = json.loads(json.dumps(description))
    if path.is_file():
        try:
            old = json.loads(path.read_text())["what"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{str(path)!r} is damaged. Remove it, or give another --out") from None
        found = differences(old, new["what"])
        if found:
            raise UserError(
                f"{str(path.parent)!r} holds a different run: {'; '.join(found[:4])}. "
                "Give the same settings to resume it, or another --out"
            )
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(new, indent=1) + "\n")


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """The differences of two JSON values, as `name: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{where}.{n}".lstrip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in differences(a, b, f"{where}.{i}")]
    return [] if old == new else [f"{where}: {old} → {new}"]


def model_writer(model: nn.Module, say: Callable[[str], None]) -> Callable[[nn.Module, Path], None]:
    """The function that saves this model: with its architecture, or weights alone if a file cannot describe it."""
    try:
        plan_of(model)
    except UserError as error:
        say(f"saving weights without the architecture: {error}")
        return _save_weights
    return save


def _save_weights(model: nn.Module, path: Path) -> None:
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    with atomic(path) as temporary:
        save_file(tensors, temporary)


def finish(session: Session) -> Result:
    """Run the session with the folder locked, and return the result."""
    main = session.accelerator.is_main_process
    learns = {name: parameter.requires_grad for name, parameter in session.model.named_parameters()}
    alone = only_run(session.out) if main else contextlib.nullcontext()
    try:
        with alone, torch.random.fork_rng(devices=[]):
            progress = session.fit()
    finally:
        for name, parameter in session.model.named_parameters():
            parameter.requires_grad_(learns[name])
    finished = progress.finished
    if main and not draw_curves(session.out):
        session.log.say("no curves.png: matplotlib is not installed")
    if not finished:
        session.log.say(f"stopped after step {progress.total}. Run the same command again to resume")
    return Result(session.out, finished, progress.total, progress.best, progress.metrics)
