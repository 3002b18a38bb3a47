"""`compare`: plan the runs, carry out those that are not done, measure what each attention costs, write it all down."""

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
from .contestants import (
    ATTENTIONS,
    DATA,
    MODEL,
    RECIPE,
    SEEDS,
    Contestant,
    combinations,
    recall,
    remember,
)
from .progress import Progress, estimate, silent, watched
from .report import write_report
from .results import gather, headline, markdown, write
from .run import Job, Outcome, finished


@dataclasses.dataclass(frozen=True)
class Results:
    """What a comparison found: `rows` as in `results.json`, the runs that failed, and where the report is."""

    out: Path
    rows: list[dict[str, Any]]
    stamp: dict[str, Any]
    failed: dict[str, str]

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    @property
    def headline(self) -> str:
        """What was found, in a sentence or two."""
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

    `fields` replace fields of the recipes (`epochs=5`). What `out` already holds is not done again: a comparison that
    was killed goes on, and one that is given another attention adds its rows.
    """
    out = Path(out)
    refuse_while_loading("a comparison")
    if not seeds:
        raise UserError("compare needs a seed to start from: give at least one")
    asked = combinations(_list(models), attentions, patches, _list(data), _list(recipes), fields)
    sources = check(asked)
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
    """Write results and report from what the folder holds."""
    contestants, commands = recall(out)
    rows, stamp = gather(out, contestants, failed)
    write(out, rows, stamp, commands)
    write_report(out, contestants, rows, stamp, commands)
    return Results(out, rows, stamp, dict(failed))


def check(contestants: Sequence[Contestant]) -> dict[str, Source]:
    """Build every model and its optimiser before any is trained, so that a mistake shows now.

    Returns the pictures to learn from of each data set.
    """
    sources: dict[str, Source] = {}
    for contestant in contestants:
        data = contestant.setting.data
        if data not in sources:
            sources[data] = open_splits(data)[0]
        classes = len(sources[data].classes)
        if not classes:
            raise UserError(f"--data {data!r} has pictures without labels: comparing needs one folder per class")
        per_epoch(contestant, sources)
        make_optimizer(build.build(contestant, classes), contestant.setting.recipe)
    return sources


def per_epoch(contestant: Contestant, sources: Mapping[str, Source]) -> int:
    """The steps a contestant learns in an epoch."""
    return steps_per_epoch(len(sources[contestant.setting.data]), contestant.setting.recipe.batch)


def carry_out(
    jobs: Sequence[Job],
    steps: Mapping[Contestant, int],
    scheduler: schedule.Scheduler,
    say: Callable[[str], None],
    progress: Progress = silent,
) -> dict[str, str]:
    """Carry out the runs; returns why those failed that did, by their folder."""
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
