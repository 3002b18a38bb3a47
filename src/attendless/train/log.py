"""What a run leaves to read: a progress bar, metrics.jsonl, TensorBoard events if asked, curves.png."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import UserError
from ..storage import atomic


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line cut off by a kill is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


class Log:
    """Rank 0's voice; the other ranks' logs are silent."""

    def __init__(self, out: Path, *, speaks: bool = True, tensorboard: bool = False) -> None:
        self.path, self.speaks = out / "metrics.jsonl", speaks
        self.console = Console(stderr=True, quiet=not speaks, highlight=False)
        self.board = _tensorboard(out) if tensorboard and speaks else None
        self.bar: Progress | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        """Forget rows after `step`: they belong to work that was lost and will be done again."""
        rows = [row for row in read_rows(self.path) if row.get("step", 0) <= step]
        if self.speaks:
            with atomic(self.path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def row(self, row: dict[str, Any]) -> None:
        if not self.speaks:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(f"{row['event']}/{name}", value, row["step"])
            self.board.flush()

    @contextlib.contextmanager
    def progress(self, text: str, total: int, done: int) -> Iterator[None]:
        """Show a bar with time left while inside; where nobody watches (no terminal), show nothing."""
        if not (self.speaks and sys.stderr.isatty()):
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
        if self.bar is not None:
            self.bar.update(
                self.bar.task_ids[0], completed=done, now=f"loss {loss:.3f} · lr {lr:.2e} · {speed:.0f} img/s"
            )


def epoch_line(row: dict[str, Any]) -> str:
    """One epoch as one line of text."""
    parts = [f"{row['phase']} epoch {row['epoch']}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}"]
    parts += [f"{name} {row[name]:.2f}" for name in ("top1", "top5") if row.get(name) is not None]
    parts += [f"{name} {row[name]:.4f}" for name in ("val_loss", "agreement") if row.get(name) is not None]
    return " · ".join([*parts, f"{row['images_per_second']:.0f} img/s"])


def draw_curves(out: Path) -> bool:
    """Draw metrics.jsonl as curves.png; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in read_rows(out / "metrics.jsonl") if row.get("event") == "epoch"]
    panels = [("loss", ("loss", "val_loss")), ("percent", ("top1", "top5")), ("learning rate", ("lr",))]
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
        raise UserError("TensorBoard is not installed: pip install tensorboard, or leave --tensorboard out") from None
    return SummaryWriter(str(out / "tensorboard"))
