"""Shards on a Ray cluster with Ray Data: a pool of processes, each with the model, computes one shard after the other.

If a process or machine is lost, Ray starts another one with the same shard. Images, model and results must be on a file
system that all machines share.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..cluster import joined
from ..plugins import load_plugins
from ..sparse import execution, policy
from .model import Opening
from .shards import Plan, Shard, compute


class Worker:
    """A process of the cluster that holds the model."""

    def __init__(self, opening: Opening, batch: int, topk: int, policy: str) -> None:
        load_plugins(opening.plugins)  # the policy may name a backend of a plug-in
        self.batch, self.topk, self.policy = batch, topk, policy
        with execution(policy):
            self.predictor = opening.open()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard = Shard(str(row["path"]), tuple(map(str, row["images"])))
        with execution(self.policy):
            return {"images": compute(self.predictor, shard, batch=self.batch, topk=self.topk)}


def compute_on_ray(address: str, plan: Plan, shards: Sequence[Shard]) -> Iterator[int]:
    """Yield the number of images of each shard as it is finished, in any order."""
    if not shards:
        return
    threads = plan.opening.threads or 1
    opening = _from_anywhere(dataclasses.replace(plan.opening, threads=threads))
    with joined(address) as ray:
        _quiet(ray.data.DataContext.get_current())
        places = max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        rows = [{"path": os.path.abspath(shard.path), "images": list(shard.images)} for shard in shards]
        done = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Worker,
            fn_constructor_args=(opening, plan.batch, plan.topk, policy()),
            num_cpus=threads,
            concurrency=min(places, len(rows)),
        )
        for row in done.iter_rows():
            yield int(row["images"])


def _from_anywhere(opening: Opening) -> Opening:
    """`opening` with absolute paths, for processes with another working directory."""
    names = {name: getattr(opening, name) for name in ("model", "weights", "predictor")}
    files = {name: os.path.abspath(path) for name, path in names.items() if path and os.path.exists(path)}
    return dataclasses.replace(opening, **files)


def _quiet(context: Any) -> None:
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
