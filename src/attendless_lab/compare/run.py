"""One run: a contestant trained from one seed, in a folder that resumes. What it found is in its `result.json`."""

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

from .contestants import Contestant

#: A kill loses no more than this of a run.
CHECKPOINT_MINUTES = 1.0


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a process needs to know to carry out a run; plain values, so that any machine can be handed it."""

    contestant: Contestant
    seed: int
    folder: str
    threads: int = 1
    workers: int = 0
    device: str = "auto"
    plugins: tuple[str, ...] = ()
    policy: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.contestant.attention} seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: its result, or why there is none."""

    job: Job
    result: dict[str, Any] | None
    reason: str = ""


def run(job: Job) -> Outcome:
    """Train to the end, from wherever the folder's last checkpoint is.

    What goes wrong comes back as a reason, for the other runs go on; unless it is a user's plain mistake, its traceback
    is left in the folder's log.
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
    setting = job.contestant.setting
    began = time.monotonic()
    try:
        load_plugins(job.plugins)  # which may have brought the backend asked for
        # By the usual backends, whatever was found quickest here before: others round differently.
        with _said_to(folder / "log.txt"), execution("off" if job.policy == "auto" else job.policy):
            model = build(job.contestant, len(open_data(setting.data, "train").classes), job.seed)
            ended = train(
                model,
                setting.data,
                attention=job.contestant.attention,
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
    """The result of a run that was carried out to its end."""
    try:
        found = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "top1" in found else None


@contextlib.contextmanager
def _said_to(path: Path) -> Iterator[None]:
    """What a run says goes into its folder: several speak at once, and the terminal belongs to the comparison."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file, contextlib.redirect_stderr(file):
        yield
