"""`train`: a model, an attention, pictures and a recipe → a folder with the weights and how they came about."""

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
    """How a run ended. `metrics` is the row of its last epoch; `finished` is False if it was asked to stop."""

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
    """Train `model`, with `attention` and `tokens` if they are given, on the pictures in `data` and leave weights,
    metrics and the recipe in `out`.

    Without a `recipe` a model that comes with weights (`weights`, `pretrained`, a saved file) is fine-tuned, any other
    starts with `quick`. `fields` replace fields of the recipe (`epochs=5`). The same call on the same `out` continues
    where it stopped.
    """
    learned = not isinstance(model, nn.Module) and not random_weights(model, weights=weights, pretrained=pretrained)
    name, why = ("finetune", "the model comes with weights") if learned else ("quick", "to start from scratch")
    chosen = settle(recipe or name, fields)
    source, val, note = open_splits(data)
    if not source.classes:
        raise UserError(f"--data {str(data)!r} has pictures without labels: training needs one folder per class")
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
        raise UserError(f"the model answers with {built.num_classes} classes, but the data has {classes}")
    set_drop(built, chosen)
    remarks = [] if recipe else [f"recipe {name}, {why}: {chosen.epochs} epochs, lr {chosen.rate():g}"]
    pictures = as_model_wants(built, source, val, chosen, names=tuple(source.classes))
    begin = Begin(built, model_text(model), data, attention, Path(out), run or Run(), note, remarks)
    with goes_on_later(begin.out):
        session = begin.session(Supervised, [Phase("train", chosen, {"label": 1.0, "extra": 1.0})], pictures)
        return finish(session)


def settle(text: str | Recipe, fields: Mapping[str, Any]) -> Recipe:
    """A recipe with some of its fields replaced; wrong names are answered with the ones that exist."""
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
    """Pictures in the size and with the mean and deviation that the model was made for."""
    config = resolve_model_data_config(model)
    size = chosen.height_width or input_size(model)
    return Data(train, val, size, tuple(config["mean"]), tuple(config["std"]), model.num_classes, labelled, names)


def set_drop(model: nn.Module, chosen: Learning) -> None:
    """Stochastic depth that grows with depth, and dropout everywhere but on attention maps, as the recipe asks."""
    if chosen.drop_path:
        places = [m for m in model.modules() if any(hasattr(m, n) for n in ("drop_path", "drop_path1", "drop_path2"))]
        for module, rate in zip(places, torch.linspace(0, chosen.drop_path, len(places)).tolist(), strict=True):
            for name in ("drop_path", "drop_path1", "drop_path2"):
                if hasattr(module, name):
                    setattr(module, name, DropPath(rate) if rate else nn.Identity())
        if is_backbone(model):  # and the branches that attentions have of their own
            start_attentions(model.blocks, scratch=False)
    if chosen.drop:
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and not name.endswith("attn_drop"):
                module.p = chosen.drop


@dataclasses.dataclass
class Begin:
    """What `train` and `distill` share at the start of a run: processes, the folder, and what stands in it."""

    model: nn.Module
    name: str
    data: str | Path
    attention: str | None
    out: Path
    run: Run
    #: How pictures were told apart, and what else is to be said at the start.
    note: str
    remarks: Sequence[str] = ()
    #: What else is the run's own, beside model and recipe.
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
        for phase in phases:  # what cannot work is said before anything is written
            steps_per_epoch(len(data.train), phase.recipe.batch)
            shares(phase.recipe.batch, accelerator.num_processes * phase.recipe.accumulate)
            make_optimizer(self.model, phase.recipe)
        self.out.mkdir(parents=True, exist_ok=True)
        log = Log(self.out, speaks=main, tensorboard=self.run.tensorboard)
        if main:
            check_and_write(self.out / "recipe.json", self._description(phases, data, accelerator))
            pictures = f"{len(data.train)} pictures to learn from, {len(data.val)} to be judged on ({self.note})"
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
    """Write the run's description, unless the folder already holds a run of something else."""
    new = json.loads(json.dumps(description))
    if path.is_file():
        try:
            old = json.loads(path.read_text())["what"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{str(path)!r} is damaged. Remove it, or give another --out") from None
        found = differences(old, new["what"])
        if found:
            raise UserError(
                f"{str(path.parent)!r} holds a run of something else: {'; '.join(found[:4])}. "
                "Give the same words to resume it, or another --out"
            )
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(new, indent=1) + "\n")


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Every place where two JSON values differ, as `name: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{where}.{n}".lstrip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in differences(a, b, f"{where}.{i}")]
    return [] if old == new else [f"{where}: {old} → {new}"]


def model_writer(model: nn.Module, say: Callable[[str], None]) -> Callable[[nn.Module, Path], None]:
    """How to write this model: in a file that knows its own architecture, or as bare weights where none can."""
    try:
        plan_of(model)
    except UserError as error:
        say(f"only bare weights will be saved: {error}")
        return _save_weights
    return save


def _save_weights(model: nn.Module, path: Path) -> None:
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    with atomic(path) as temporary:
        save_file(tensors, temporary)


def finish(session: Session) -> Result:
    """Run the session, alone in its folder, and say how it ended."""
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
        session.log.say(f"stopped after step {progress.total}. Run the same command again to continue")
    return Result(session.out, finished, progress.total, progress.best, progress.metrics)
