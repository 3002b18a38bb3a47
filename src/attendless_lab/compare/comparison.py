"""`compare`: plan the runs, execute those that are missing, measure the cost of each attention, write the results."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from attendless.data.opening import open_splits
from attendless.data.source import Source
from attendless.errors import UserError
from attendless.plugins import plugin_files, refuse_while_loading
from attendless.sparse import policy
from attendless.train.loader import steps_per_epoch
from attendless.train.optimise import make_optimizer
from attendless.train.process import only_run

from . import build, cost, schedule
from .progress import Progress, estimate, silent, watched
from .report import write_report
from .results import gather, headline, markdown, write
from .run import Job, Outcome, finished
from .variants import (
    ATTENTIONS,
    DATA,
    MODEL,
    RECIPE,
    SEEDS,
    Variant,
    combinations,
    recall,
    remember,
)


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of a comparison: `rows` as in `results.json`, the failed runs, and the path of the report."""

    out: Path
    rows: list[dict[str, Any]]
    stamp: dict[str, Any]
    failed: dict[str, str]

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    @property
    def headline(self) -> str:
        """The main finding in one or two sentences."""
        return headline(self.rows)

    def __str__(self) -> str:
        return markdown(self.rows)


def compare(
    models: str | Sequence[str] = MODEL,
    attentions: Sequence[str] = ATTENTIONS,
    *,
    patches: Sequence[int | None] = (None,),
    data: str | Sequence[str] = DATA,
    recipes: str | Sequence[str] = RECIPE,
    seeds: Sequence[int] = SEEDS,
    out: str | Path = "attendless-out/compare",
    jobs: int | None = None,
    threads: int = 1,
    workers: int = 0,
    device: str = "auto",
    ray: str | None = None,
    factors: Sequence[int] = cost.FACTORS,
    budget: float = cost.BUDGET,
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
    **fields: Any,
) -> Results:
    """Train every attention in every setting from every seed, measure each, and write results and report to `out`.

    Among the attentions, `all` stands for one of each registered mechanism, also of plug-ins. Those that a model cannot
    use are skipped with a message. `fields` replace fields of the recipes (`epochs=5`). Finished runs in `out` are not
    repeated: a killed comparison resumes, and another attention adds its rows.
    """
    out = Path(out)
    refuse_while_loading("a comparison")
    if not seeds:
        raise UserError("compare needs a seed to start from: give at least one")
    asked = combinations(_list(models), attentions, patches, _list(data), _list(recipes), fields)
    sources, asked = check(asked, required=attentions, say=say)
    steps = {c: c.setting.recipe.steps(per_epoch(c, sources)) for c in asked}
    with only_run(out):
        remember(out, asked, command)
        jobs = jobs or schedule.at_once(threads, device)
        plugins = tuple(plugin_files())
        every = [
            Job(c, seed, str(out / c.folder / f"seed-{seed}"), threads, workers, device, plugins, policy())
            for seed in seeds
            for c in asked
        ]
        to_do = [job for job in every if finished(Path(job.folder)) is None]
        if len(to_do) < len(every):
            say(f"{len(every) - len(to_do)} of {len(every)} runs were finished before")
        if to_do and not ray:
            say(estimate(to_do, steps, sources, at_once=jobs))
        failed = carry_out(to_do, steps, schedule.ray(ray) if ray else schedule.local(jobs), say, progress)
        for setting, group in groupby(asked, key=lambda c: c.setting):
            missing = [c for c in group if cost.measured(out / c.folder) is None]
            if missing:
                measuring: dict[str, Any] = {
                    "device": device,
                    "threads": threads,
                    "jobs": jobs,
                    "factors": factors,
                    "budget": budget,
                }
                cost.measure(missing, out, len(sources[setting.data].classes), say=say, **measuring)
        return publish(out, failed)


def publish(out: Path, failed: Mapping[str, str] = types.MappingProxyType({})) -> Results:
    """Write results and report from the finished runs in the folder."""
    variants, commands = recall(out)
    rows, stamp = gather(out, variants, failed)
    write(out, rows, stamp, commands)
    write_report(out, variants, rows, stamp, commands)
    return Results(out, rows, stamp, dict(failed))


def check(
    variants: Sequence[Variant], required: Sequence[str], say: Callable[[str], None]
) -> tuple[dict[str, Source], list[Variant]]:
    """Build every model and its optimiser before any is trained, so that mistakes are reported first.

    A model that cannot be built is an error if its attention is `required`; otherwise the variant is skipped. Returns
    the training images of each data set, and the remaining variants.
    """
    sources: dict[str, Source] = {}
    remaining = []
    for variant in variants:
        data = variant.setting.data
        if not variant.setting.recipe.epochs:
            raise UserError("epochs=0: a comparison trains every attention, so give at least 1")
        if data not in sources:
            sources[data] = open_splits(data)[0]
        classes = len(sources[data].classes)
        if not classes:
            raise UserError(f"--data {data!r} has images without labels: comparing needs one folder per class")
        per_epoch(variant, sources)
        try:
            make_optimizer(build.build(variant, classes), variant.setting.recipe)
        except UserError as error:
            if variant.attention in required:
                raise
            say(f"{variant.attention} is skipped: {error}")
        else:
            remaining.append(variant)
    return sources, remaining


def per_epoch(variant: Variant, sources: Mapping[str, Source]) -> int:
    """The optimiser steps of an epoch."""
    return steps_per_epoch(len(sources[variant.setting.data]), variant.setting.recipe.batch)


def carry_out(
    jobs: Sequence[Job],
    steps: Mapping[Variant, int],
    scheduler: schedule.Scheduler,
    say: Callable[[str], None],
    progress: Progress = silent,
) -> dict[str, str]:
    """Execute the runs; returns the reason of each failure, by folder."""
    failed = {}
    with watched(jobs, steps, progress):
        for i, outcome in enumerate(scheduler(jobs), start=1):
            say(f"{i}/{len(jobs)} {_told(outcome)}")
            if outcome.result is None:
                failed[outcome.job.folder] = outcome.reason
    return failed


def _told(outcome: Outcome) -> str:
    result = outcome.result
    if result is None:
        return f"{outcome.job.name}: {outcome.reason}"
    return f"{outcome.job.name}: {result['top1']:.2f} % after {result['seconds']:.0f} s"


def _list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
