"""One run: a variant trained from one seed, in a folder that resumes. Its result is `result.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attendless.errors import UserError
from attendless.plugins import load_plugins
from attendless.sparse import execution
from attendless.storage import atomic

from .variants import Variant

#: A killed run loses at most this much work.
CHECKPOINT_MINUTES = 1.0


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a process needs to execute a run, as plain values that any machine can receive."""

    variant: Variant
    seed: int
    folder: str
    threads: int = 1
    workers: int = 0
    device: str = "auto"
    plugins: tuple[str, ...] = ()
    policy: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.variant.attention} seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run, or the reason why there is none."""

    job: Job
    result: dict[str, Any] | None
    reason: str = ""


def run(job: Job) -> Outcome:
    """Train to the end, from the last checkpoint in the folder.

    A failure is returned as a reason, because the other runs continue; unless it is a `UserError`, its traceback is
    written to the log of the folder.
    """
    import torch

    from attendless.data import open_data
    from attendless.train import Run, train

    from .build import build

    folder = Path(job.folder)
    done = finished(folder)
    if done is not None:
        return Outcome(job, done)
    torch.set_num_threads(job.threads)
    setting = job.variant.setting
    began = time.monotonic()
    try:
        load_plugins(job.plugins)  # a plug-in may register the backend given
        # The default backends, not the fastest measured on this machine: others round differently.
        with _said_to(folder / "log.txt"), execution("off" if job.policy == "auto" else job.policy):
            model = build(job.variant, len(open_data(setting.data, "train").classes), job.seed)
            ended = train(
                model,
                setting.data,
                attention=job.variant.attention,
                recipe=dataclasses.replace(setting.recipe, seed=job.seed),
                out=folder,
                run=Run(workers=job.workers, device=job.device, checkpoint_minutes=CHECKPOINT_MINUTES, keep=2),
            )
    except UserError as error:
        return Outcome(job, None, str(error))
    except Exception as error:
        with open(folder / "log.txt", "a") as log:
            traceback.print_exc(file=log)
        return Outcome(job, None, f"{type(error).__name__}: {error} (see {folder / 'log.txt'})")
    if not ended.finished:
        return Outcome(job, None, "stopped before its end")
    kept = ("top1", "top5", "val_loss", "loss", "images", "skipped", "epoch")
    result = {"seed": job.seed, "steps": ended.steps, "best": ended.best}
    result |= {name: ended.metrics[name] for name in kept if name in ended.metrics}
    result["seconds"] = round(time.monotonic() - began, 1)
    with atomic(folder / "result.json") as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    return Outcome(job, result)


def finished(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run."""
    try:
        found = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "top1" in found else None


@contextlib.contextmanager
def _said_to(path: Path) -> Iterator[None]:
    """Redirect a run's messages to its folder: several runs print at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file, contextlib.redirect_stderr(file):
        yield
