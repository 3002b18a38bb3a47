"""Dynamic batching over supervised worker processes: images from any thread → batches → predictions.

Each worker has a thread that collects a batch: it takes a full batch at once, and otherwise waits briefly for more
images. While a worker computes, the next batch fills. If a worker dies, the thread starts another with the same batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..predict import Card, Opening
from ..sparse import policy
from ..stamp import cores
from .slots import Shape, Slots
from .worker import Lost, Worker

#: Attempts to compute a batch whose worker dies.
ATTEMPTS = 3
#: Seconds between checks of an idle worker, and the longest pause before a restart.
LOOK, LONGEST_PAUSE = 0.25, 5.0


class Failed(Exception):
    """The model failed on a batch; the message gives the cause."""


@dataclasses.dataclass(frozen=True)
class _Job:
    place: int
    answer: Future[Tensor]


class Engine:
    """Computes predictions: `submit` takes a preprocessed image and returns the future of its prediction."""

    def __init__(
        self,
        opening: Opening,
        *,
        batch: int = 8,
        wait_ms: float = 5.0,
        workers: int = 1,
        on_batch: Callable[[int, float], None] = lambda size, seconds: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        # One core remains for HTTP and decoding.
        self.threads = opening.threads or max(1, (cores() - 1) // workers)
        self.opening = dataclasses.replace(opening, threads=self.threads)
        self.policy = policy()  # the policy is thread-local, and other threads restart workers
        self.batch, self.wait, self.count = batch, wait_ms / 1000, workers
        self.on_batch, self.on_restart = on_batch, on_restart
        self.ready: queue.Queue[_Job | None] = queue.Queue()
        self.free: queue.Queue[int] = queue.Queue()
        self.lines: list[_Line] = []

    def start(self) -> Card:
        """Start the workers; `UserError` if the model cannot be opened."""
        workers = [Worker(self.opening, self.policy) for _ in range(self.count)]
        try:
            *_, self.card = [worker.card() for worker in workers]
            found = self.card.description
            # For each worker a batch in progress and the next one, and the images that threads are decoding.
            places = 2 * self.batch * self.count + cores()
            shape = Shape(places, (*found.size, found.channels), self.card.scores + self.card.features)
            self.slots = Slots(shape)
            for worker in workers:
                worker.use(self.slots)
        except (Lost, UserError) as error:
            for worker in workers:
                worker.end()
            if isinstance(error, UserError):
                raise
            raise UserError("the process that opens the model died, perhaps for lack of memory") from None
        for place in range(places):
            self.free.put(place)
        self.lines = [_Line(self, worker) for worker in workers]
        for line in self.lines:
            line.start()
        return self.card

    def submit(self, pixels: np.ndarray) -> Future[Tensor]:
        """Queue one preprocessed image [H, W, C]. Waits while all slots are in use."""
        job = _Job(self.free.get(), Future())
        job.answer.set_running_or_notify_cancel()  # a cancelled request must not affect its batch
        self.slots.pictures[job.place].numpy()[:] = pixels
        self.ready.put(job)
        return job.answer

    def alive(self) -> int:
        """Number of workers that are running."""
        return sum(line.answering for line in self.lines)

    def processes(self) -> list[int]:
        """The process IDs of the workers."""
        return [line.worker.process.pid or 0 for line in self.lines if line.answering]

    def stop(self) -> None:
        """Finish all submitted images, then stop the workers."""
        for _ in self.lines:
            self.ready.put(None)
        for line in self.lines:
            line.join()
        self.slots.close()


class _Line(threading.Thread):
    """The thread of one worker: collects batches, sends them to the worker, and restarts the worker if it dies."""

    def __init__(self, engine: Engine, worker: Worker) -> None:
        super().__init__(name="attendless worker", daemon=True)
        self.engine, self.worker, self.answering, self.pause = engine, worker, True, 0.0

    def run(self) -> None:
        more = True
        while more:
            jobs, more = self._gather()
            if jobs:
                self._settle(jobs, self._compute(jobs))
        self.answering = False
        self.worker.end(patience=5.0)

    def _gather(self) -> tuple[list[_Job], bool]:
        """The next batch, and whether to continue after it."""
        first = self._first()
        if first is None:
            return [], False
        jobs, deadline = [first], time.monotonic() + self.engine.wait
        while len(jobs) < self.engine.batch:
            try:
                job = self.engine.ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if job is None:
                return jobs, False
            jobs.append(job)
        return jobs, True

    def _first(self) -> _Job | None:
        while True:
            try:
                return self.engine.ready.get(timeout=LOOK)
            except queue.Empty:
                if not self.worker.alive():
                    self._restart()

    def _compute(self, jobs: list[_Job]) -> str | None:
        """Compute a batch; returns None on success, else an error message."""
        places = [job.place for job in jobs]
        for _ in range(ATTEMPTS):
            began = time.perf_counter()
            try:
                wrong = self.worker.answer(places)
            except Lost:
                self._restart()
                continue
            self.engine.on_batch(len(jobs), time.perf_counter() - began)
            return wrong
        return f"the worker process died, or could not be started, {ATTEMPTS} times with this batch"

    def _settle(self, jobs: list[_Job], wrong: str | None) -> None:
        answers = self.engine.slots.answers[[job.place for job in jobs]]
        for job in jobs:
            self.engine.free.put(job.place)
        for job, answer in zip(jobs, answers, strict=True):
            if wrong is not None:
                job.answer.set_exception(Failed(wrong))
            elif not torch.isfinite(answer).all():
                job.answer.set_exception(Failed("the model returns NaN or infinity for this image"))
            else:
                job.answer.set_result(answer)

    def _restart(self) -> None:
        """Replace a worker that died. If the new one cannot open the model, try again later, with increasing pauses."""
        self.answering = False
        self.worker.end()
        time.sleep(self.pause)
        self.pause = min(2 * self.pause + 0.1, LONGEST_PAUSE)
        self.engine.on_restart()
        self.worker = Worker(self.engine.opening, self.engine.policy)
        with contextlib.suppress(Lost, UserError):
            self.worker.card()
            self.worker.use(self.engine.slots)
            self.answering, self.pause = True, 0.0
