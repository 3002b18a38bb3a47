"""Output of a run: progress bar, metrics.jsonl, TensorBoard events if requested, curves.png."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import UserError
from ..storage import atomic

#: Metrics in percent, of all tasks.
PERCENT = ("top1", "top5", "miou", "ap", "ap50")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line that a kill cut off."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


@dataclasses.dataclass
class Pace:
    """When to print the time left if there is no progress bar: after the first steps, then twice a minute. Short runs
    print none."""

    total: int
    #: Steps done before the start, and the time of the start.
    before: int
    began: float
    said: float | None = None

    def left(self, done: int, now: float) -> float | None:
        """Seconds left if it is time to print them, else None."""
        waited, taken = now - (self.began if self.said is None else self.said), now - self.began
        if not self.before < done < self.total or waited < (3 if self.said is None else 30):
            return None
        left = (self.total - done) * taken / (done - self.before)
        if self.said is None and taken + left < 20:
            return None
        self.said = now
        return left


def duration(seconds: float) -> str:
    """A rounded time with unit: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class Log:
    """Prints and writes for rank 0; silent in other ranks."""

    def __init__(self, out: Path, *, speaks: bool = True, tensorboard: bool = False) -> None:
        self.path, self.speaks = out / "metrics.jsonl", speaks
        self.console = Console(stderr=True, quiet=not speaks, highlight=False)
        self.board = _tensorboard(out) if tensorboard and speaks else None
        self.bar: Progress | None = None
        self.pace: Pace | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        """Remove rows after `step`: the resumed run writes them again."""
        rows = [row for row in read_rows(self.path) if row.get("step", 0) <= step]
        if self.speaks:
            with atomic(self.path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def row(self, row: dict[str, Any]) -> None:
        if not self.speaks:
            return
        with open(self.path, "ab", buffering=0) as file:
            line, end = f"{json.dumps(row)}\n".encode(), file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError as error:  # remove the part of a row that a full disk accepted
                file.truncate(end)
                raise OSError(error.errno, error.strerror, str(self.path)) from None
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(f"{row['event']}/{name}", value, row["step"])
            self.board.flush()

    @contextlib.contextmanager
    def progress(self, text: str, total: int, done: int) -> Iterator[None]:
        """Show a progress bar with the time left; without a terminal, print a line at intervals."""
        if not (self.speaks and sys.stderr.isatty()):
            self.pace = Pace(total, done, time.monotonic())
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[now]}"), console=self.console, transient=True) as self.bar:
            self.bar.add_task(text, total=total, completed=done, now="")
            try:
                yield
            finally:
                self.bar = None

    def advance(self, done: int, loss: float, lr: float, speed: float) -> None:
        left = None if self.pace is None else self.pace.left(done, time.monotonic())
        if self.pace is not None and left is not None:
            self.say(f"step {done}/{self.pace.total}, loss {loss:.3f}, about {duration(left)} left")
        if self.bar is not None:
            self.bar.update(
                self.bar.task_ids[0], completed=done, now=f"loss {loss:.3f} · lr {lr:.2e} · {speed:.0f} img/s"
            )


def epoch_line(row: dict[str, Any]) -> str:
    """One epoch as one line of text."""
    parts = [f"{row['phase']} epoch {row['epoch']}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}"]
    parts += [f"{name} {row[name]:.2f}" for name in PERCENT if row.get(name) is not None]
    parts += [f"{name} {row[name]:.4f}" for name in ("val_loss", "agreement") if row.get(name) is not None]
    return " · ".join([*parts, f"{row['images_per_second']:.0f} img/s"])


def draw_curves(out: Path) -> bool:
    """Draw metrics.jsonl as curves.png; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in read_rows(out / "metrics.jsonl") if row.get("event") == "epoch"]
    panels = [("loss", ("loss", "val_loss")), ("percent", PERCENT), ("learning rate", ("lr",))]
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axis, (title, names) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name in names:
            points = [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
                axis.legend(frameon=False)
        axis.set(title=title, xlabel="epoch")
        axis.spines[["top", "right"]].set_visible(False)
    with atomic(out / "curves.png") as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return True


def _tensorboard(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "TensorBoard is not installed: pip install tensorboard, or leave out --set tensorboard=true"
        ) from None
    return SummaryWriter(str(out / "tensorboard"))
