"""The worker process: opens the model and computes batches until the server closes the pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import Any

from ..errors import UserError
from ..measure.malloc import keep_memory
from ..plugins import load_plugins
from ..predict import Card, Opening
from ..sparse import execution
from .slots import Shape, Slots

#: Time limits in seconds for opening a model and for computing a batch.
TO_OPEN, TO_ANSWER = 300.0, 120.0


class Lost(Exception):
    """The worker died or does not respond."""


class Worker:
    """The server's handle of a worker, which uses the execution policy `policy`. Not thread-safe."""

    def __init__(self, opening: Opening, policy: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=work, args=(opening, policy, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process closes the pipe

    def card(self) -> Card:
        """The card of the opened model; raises `UserError` if it cannot be opened."""
        found = self._receive(TO_OPEN)
        if isinstance(found, str):
            raise UserError(found)
        return found

    def use(self, slots: Slots) -> None:
        self._send((slots.shape, slots.name))
        self._receive(TO_OPEN)

    def answer(self, places: list[int]) -> str | None:
        """Compute the images in these slots; returns None when the predictions are complete, else an error message."""
        self._send(places)
        return self._receive(TO_ANSWER)

    def alive(self) -> bool:
        return self.process.is_alive()

    def end(self, patience: float = 0.0) -> None:
        """Wait up to `patience` seconds for the worker to exit, then kill it."""
        self.pipe.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    def _send(self, value: Any) -> None:
        try:
            self.pipe.send(value)
        except OSError:
            raise Lost from None

    def _receive(self, patience: float) -> Any:
        try:
            if self.pipe.poll(patience):
                return self.pipe.recv()
        except Exception:  # the pipe was closed, perhaps within a message
            raise Lost from None
        raise Lost


def work(opening: Opening, policy: str, pipe: Connection) -> None:
    """The main function of a worker. It exits when the pipe is closed, which also happens if the server is killed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_memory()
    with contextlib.suppress(EOFError, OSError):
        try:
            load_plugins(opening.plugins)  # the policy may name a backend of a plug-in
            with execution(policy):
                predictor = opening.open()
        except Exception as error:
            pipe.send(str(error) if isinstance(error, UserError) else repr(error))
            return
        pipe.send(predictor.card)
        with execution(policy):
            _answer(predictor, pipe, *pipe.recv())


def _answer(predictor: Any, pipe: Connection, shape: Shape, name: str) -> None:
    slots = Slots(shape, name)
    try:
        pipe.send(None)
        while True:
            places = pipe.recv()
            try:
                slots.answers[places] = predictor(slots.pictures[places])
                pipe.send(None)
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
    finally:
        slots.close()
