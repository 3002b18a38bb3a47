"""The training loop: phases, checkpoints and exact resume.

A run on one process that is killed and resumed is bit-identical to an uninterrupted one: random draws are functions of
the step, and a checkpoint holds all other state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from ..data.source import IGNORE
from ..errors import UserError
from ..randomness import DROPOUT, key
from ..sizes import image_config
from .annealing import anneal, strength
from .checkpoint import Store
from .loader import Steps, eval_loader, steps_per_epoch, train_loader
from .log import Log, epoch_line
from .objective import trace_bad
from .optimise import Average, Schedule, choose_trained, make_optimizer
from .process import Stop, default_workers
from .recipe import Run
from .state import Data, Phase, Progress
from .task import Classification, Task


class Diverged(UserError):
    """The loss or a gradient is NaN or infinite."""


@dataclasses.dataclass
class Session:
    """The parts of a run that all phases share."""

    model: nn.Module
    #: Builds the module that computes the losses of a phase.
    objective: Callable[[nn.Module, Mapping[str, float]], nn.Module]
    phases: Sequence[Phase]
    data: Data
    run: Run
    out: Path
    accelerator: Accelerator
    log: Log
    #: Writes a model to a path.
    save_model: Callable[[nn.Module, Path], None]
    task: Task = dataclasses.field(default_factory=Classification)
    #: The teacher of the objective or the task.
    teacher: nn.Module | None = None
    #: Called in the main process at the end of a phase; called again if the run is killed right after it.
    after_phase: Callable[[Phase], None] | None = None

    def __post_init__(self) -> None:
        self.store = Store(self.out / "checkpoints", self.run.keep)
        self.workers = default_workers(self.accelerator.device) if self.run.workers < 0 else self.run.workers

    def fit(self) -> Progress:
        """Run all unfinished phases; return the progress at the end."""
        for model in (self.model, self.teacher):
            if model is not None:
                model.to(self.accelerator.device)
        saved = self._read()
        progress = Progress() if saved is None else Progress(**saved["progress"])
        if saved is not None:
            self.log.say(f"resuming after step {progress.total} from {str(self.out)!r}")
        self.log.rewind(progress.total)
        with Stop().listening() as stop:
            for number in range(progress.phase, len(self.phases)):
                if number > progress.phase:
                    progress.phase, progress.before, progress.step = number, progress.total, 0
                phase = self.phases[number]
                if not PhaseLoop(self, phase, progress, saved).run(stop):
                    return progress
                if self.after_phase is not None and self.accelerator.is_main_process:
                    self.after_phase(phase)
                saved = None
        progress.finished = True
        return progress

    def _read(self) -> Any | None:
        """The newest valid checkpoint, the same for every process."""
        with self.accelerator.main_process_first():  # `read` renames damaged files
            saved = self.store.read(self.log.say)
        step = -1 if saved is None else saved["progress"]["before"] + saved["progress"]["step"]
        if len(set(gather_object([step]))) > 1:
            raise UserError(f"processes find different checkpoints in {str(self.out)!r}: use a shared folder")
        return saved


class PhaseLoop:
    """The state of a running phase: optimiser, schedule, averaged weights, and the position in the data."""

    def __init__(self, session: Session, phase: Phase, progress: Progress, saved: dict[str, Any] | None) -> None:
        self.session, self.phase, self.recipe, self.progress = session, phase, phase.recipe, progress
        self.accelerator, self.model = session.accelerator, session.model
        self.per_epoch = steps_per_epoch(len(session.data.train), self.recipe.batch)
        self.steps = self.recipe.steps(self.per_epoch)
        self.first_epoch = sum(p.recipe.total_epochs for p in session.phases[: progress.phase])
        if saved is not None:
            self.model.load_state_dict(saved["model"])
        self._tell_the_model()
        choose_trained(self.model, phase.trained)
        self.optimizer = make_optimizer(self.model, self.recipe)
        self.schedule = Schedule(self.optimizer, self.recipe, self.per_epoch)
        self.average = Average(self.model, self.recipe.ema)
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.schedule.load(saved["schedule"])
            self.average.load(saved["average"])
        objective = session.objective(self.model, phase.losses)
        self.compiled = torch.compile(objective) if self.recipe.compile else objective
        self.objective: nn.Module = self.accelerator.prepare_model(self.compiled)
        self.prepare = session.task.batches(session.data, self.recipe)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _tell_the_model(self) -> None:
        """Store classes and preprocessing in the model's configuration, so that saved files contain them."""
        known = {**image_config(self.model), **self.session.task.told(self.session.data, self.recipe)}
        self.model.pretrained_cfg = self.model.default_cfg = known  # type: ignore[assignment]

    def run(self, stop: Stop) -> bool:
        """Train to the end of the phase; False if the run was stopped before."""
        session, progress, epoch_loss = self.session, self.progress, 0.0
        if progress.step >= self.steps:
            return True
        loader, judge = self._train_loader(), self._eval_loader()
        saved_at = marked_at = time.monotonic()
        marked, stopped = progress.step, False
        title = f"{self.phase.name} · {self.steps} steps"
        batches = iter(loader)
        with session.log.progress(title, self.steps, progress.step):
            while progress.step < self.steps and not stopped:
                self.model.train()
                terms, stopped = self._step(batches, stop)
                epoch_loss = sum(terms.values())
                speed = (progress.step - marked) * self.recipe.batch / max(time.monotonic() - marked_at, 1e-9)
                session.log.advance(progress.step, epoch_loss, self.schedule.rate(), speed)
                ended = progress.step % self.per_epoch == 0 or progress.step == self.steps
                if progress.step % session.run.log_every == 0:
                    session.log.row(self._row("step", epoch_loss, speed) | terms)
                if ended:
                    self._end_epoch(judge, speed)
                if ended or stopped or time.monotonic() - saved_at > 60 * session.run.checkpoint_minutes:
                    self._save()
                    saved_at = time.monotonic()
                if ended:  # the training speed excludes evaluation
                    marked, marked_at = progress.step, time.monotonic()
        self.accelerator.free_memory()
        return progress.step >= self.steps

    def _step(self, batches: Any, stop: Stop) -> tuple[dict[str, float], bool]:
        """One optimiser step. Returns the loss terms, averaged over processes, and whether any process must stop."""
        recipe, progress = self.recipe, self.progress
        self.schedule.before(progress.step)
        anneal(self.model, strength(progress.step / self.per_epoch, recipe.reduce))
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for part in range(recipe.accumulate):
            images, targets = self._batch(next(batches))
            torch.manual_seed(key(DROPOUT, recipe.seed, progress.total, self.accelerator.process_index, part) >> 1)
            last = part == recipe.accumulate - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.objective):
                with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                    terms = self.objective(images, targets)
                loss = torch.stack(list(terms.values())).sum() / recipe.accumulate
                loss.backward()
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float() / recipe.accumulate
        norm = nn.utils.clip_grad_norm_(self.parameters, recipe.clip or math.inf)
        # One reduction for the loss terms, the gradient norm and the request to stop.
        told = torch.stack([*sums.values(), norm.detach().float(), norm.new_tensor(float(stop.asked))])
        values = self.accelerator.reduce(told, reduction="mean").tolist()
        if not all(map(math.isfinite, values[:-1])):
            self._diverged(images, targets, sum(values[: len(sums)]))
        self.optimizer.step()
        progress.step += 1
        self.average.update(progress.step)
        result = dict(zip(sums, values, strict=False))
        for name, value in result.items():
            progress.sums[name] = progress.sums.get(name, 0.0) + value
        progress.counted += 1
        return result, values[-1] > 0

    def _batch(self, batch: Any) -> tuple[Tensor, Any]:
        images, targets, bad = batch
        self._name_bad_images(bad[bad != IGNORE].tolist())
        device = self.accelerator.device
        images, targets = tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), (images, targets))
        return self.prepare(images, targets, self.progress.total)

    def _name_bad_images(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index not in self.progress.bad_images:
                self.progress.bad_images.append(index)
                self.session.log.say(f"skipped, cannot be read: {self.session.data.train.name(index)}")

    def _gather_bad_images(self) -> None:
        """Collect the unreadable images that other processes found."""
        self._name_bad_images(sorted(gather_object(list(self.progress.bad_images))))

    def _diverged(self, images: Tensor, targets: Any, loss: float) -> None:
        step, rate = self.progress.total, self.schedule.rate()
        where = trace_bad(self.accelerator.unwrap_model(self.objective), images, targets)
        kept = self.session.store.steps()
        last = f"the last good checkpoint is step {kept[-1]} in" if kept else "no checkpoint was written yet in"
        raise Diverged(
            f"the loss became {loss} at step {step}, learning rate {rate:.3g}. First bad tensor: {where}. This "
            f"step changed no weights; {last} {str(self.session.store.folder)!r}. Try a lower lr, more warmup, or clip"
        )

    def _end_epoch(self, judge: DataLoader[Any], speed: float) -> None:
        """Evaluate if due, save the best weights, update the schedule, write the row of the epoch."""
        progress, session = self.progress, self.session
        means = {name: value / progress.counted for name, value in progress.sums.items()}
        row = self._row("epoch", sum(means.values()), speed) | means
        epoch = -(-progress.step // self.per_epoch)
        if epoch % self.recipe.eval_every == 0 or progress.step == self.steps:
            found = session.task.evaluate(self.average.model, judge, self.accelerator, session.data)
            row |= found
            score = session.task.score(session.data, found, row["loss"])
            if progress.best is None or score > progress.best:
                progress.best = score
                self._write(self.average.model, "best.safetensors")
            self.schedule.after_epoch(found.get("val_loss"))
        self._gather_bad_images()
        row["skipped_training_images"] = len(progress.bad_images)
        session.log.row(row)
        session.log.say(epoch_line(row))
        progress.sums, progress.counted, progress.metrics = {}, 0, row

    def _save(self) -> None:
        self._write(self.average.model, "last.safetensors")
        if self.accelerator.is_main_process:
            state = {
                "progress": dataclasses.asdict(self.progress),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state(),
                "average": self.average.state(),
            }
            self.session.store.write(self.progress.total, state)

    def _write(self, model: nn.Module, name: str) -> None:
        if self.accelerator.is_main_process:
            self.session.save_model(model, self.session.out / name)

    def _row(self, event: str, loss: float, speed: float) -> dict[str, Any]:
        epoch = -(-self.progress.step // self.per_epoch) + self.first_epoch
        place = {"event": event, "phase": self.phase.name, "epoch": epoch, "step": self.progress.total}
        return place | {"loss": loss, "lr": self.schedule.rate(), "images_per_second": round(speed, 2)}

    def _train_loader(self) -> DataLoader[Any]:
        data, recipe, accelerator = self.session.data, self.recipe, self.accelerator
        steps = Steps(
            count=len(data.train),
            batch=recipe.batch,
            start=self.progress.step,
            stop=self.steps,
            seed=recipe.seed,
            repeats=recipe.repeats,
            accumulate=recipe.accumulate,
            rank=accelerator.process_index,
            processes=accelerator.num_processes,
            first_epoch=self.first_epoch,
        )
        return train_loader(self.session.task.drawn(data, recipe), steps, self.session.workers)

    def _eval_loader(self) -> DataLoader[Any]:
        data, recipe, accelerator = self.session.data, self.recipe, self.accelerator
        prepared = self.session.task.judged(data, recipe)
        batch = max(1, recipe.batch // (accelerator.num_processes * recipe.accumulate))
        workers, rank = self.session.workers, accelerator.process_index
        return eval_loader(prepared, batch, workers, rank, accelerator.num_processes)
