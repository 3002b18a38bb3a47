"""Processes of a run: devices, graceful stop, one run per folder."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from ..errors import UserError
from ..stamp import cores

try:
    import fcntl
except ImportError:  # not a Unix: no lock
    fcntl = None  # type: ignore[assignment]


def accelerator(device: str = "auto") -> Accelerator:
    """The accelerator of one process, or of those that `torchrun` or `accelerate launch` started."""
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device {device!r}: expected auto, cpu, cuda or mps")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device, True):
        raise UserError(f"device {device!r} is not available: torch does not find it on this machine")
    # A frozen phase, or a mechanism that trains without some of its weights, leaves parameters without a gradient.
    warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified.*")
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    made = Accelerator(cpu=device == "cpu" or not any(available.values()), kwargs_handlers=[unused])
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if made.num_processes != asked:
        raise UserError(f"{asked} processes were started, but accelerate joined {made.num_processes}: use torchrun")
    return made


def default_workers(device: torch.device) -> int:
    """Enough to supply a GPU; on a CPU the model needs the cores."""
    return min(cores(), 8) if device.type == "cuda" else min(2, cores() - 1)


class Stop:
    """Ctrl-C or SIGTERM stops the run after the current step; a second Ctrl-C stops it at once."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.asked = not self.asked, True
        if first and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(RuntimeError):  # raised if the signal interrupts another print
                print("\nattendless: stopping after this step and saving a checkpoint", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def ignore_interrupts(_: int) -> None:
    """Ignore Ctrl-C in a worker: the terminal sends it to all processes, but the main process decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Held(UserError):
    """Another run uses the folder."""


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Lock the folder for this run; raises `Held` if another run has it. The system releases the lock after a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as handle:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Held(f"another run is writing to {str(folder)!r}: wait for it, or give another --out") from None
        yield
