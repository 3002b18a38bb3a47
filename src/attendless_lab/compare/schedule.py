"""Schedulers that execute the runs: processes of this machine, or a Ray cluster. Both give the same results.

Each run has a fixed number of threads and its own process, so that its results do not depend on the other runs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from attendless.cluster import joined
from attendless.errors import UserError
from attendless.stamp import cores

from .run import Job, Outcome, run

Scheduler = Callable[[Sequence[Job]], Iterator[Outcome]]


def accelerator(device: str) -> str:
    """The device that `device` selects on this machine: cpu, cuda or mps."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def at_once(threads: int, device: str) -> int:
    """How many runs to execute in parallel: as many as there are cores, or one on an accelerator."""
    return max(1, cores() // threads) if accelerator(device) == "cpu" else 1


def local(count: int) -> Scheduler:
    """Up to `count` runs in parallel, each in its own process on this machine."""

    def schedule(jobs: Sequence[Job]) -> Iterator[Outcome]:
        if not jobs:
            return
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(count, len(jobs)), mp_context=spawn, initializer=_begin, initargs=(os.getpid(),))
        try:
            for future in as_completed([pool.submit(run, job) for job in jobs]):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "the process of a run was killed, perhaps out of memory: give the same command again to resume, with "
                "fewer --jobs if need be"
            ) from None
        except BaseException:
            # On SIGTERM a run saves a checkpoint before it ends.
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    return schedule


def _begin(parent: int) -> None:
    """Set up a worker: the parent handles Ctrl-C, and the worker exits if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def ray(address: str) -> Scheduler:
    """Every run as a task of the Ray cluster at `address` (`local` starts one here, `auto` joins one that runs).

    The folder of results must be on a file system that all its machines share.
    """

    def schedule(jobs: Sequence[Job]) -> Iterator[Outcome]:
        if not jobs:
            return
        with joined(address) as cluster:
            task = cluster.remote(run)
            # A run whose machine fails resumes on another.
            needs = [{"num_cpus": j.threads, "num_gpus": int(accelerator(j.device) == "cuda")} for j in jobs]
            pending = [task.options(max_retries=3, **need).remote(job) for job, need in zip(jobs, needs, strict=True)]
            while pending:
                done, pending = cluster.wait(pending, num_returns=1)
                yield cluster.get(done[0])

    return schedule
