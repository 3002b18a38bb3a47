"""A study: the question of a paper at a scale that a CPU can handle, run by run, in a folder that resumes.

Runs are those of `compare`: weights shared with full attention start from the same values, and all variants see the
same images in the same order. Finished runs are not repeated; missing ones follow the order of the study, the most
informative first. Differences are paired by seed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from attendless.backbones.cost import parameters
from attendless.data import open_data
from attendless.data.source import BadImage
from attendless.errors import UserError, unknown
from attendless.stamp import stamp
from attendless.storage import atomic
from attendless.train.process import Held, only_run
from attendless.train.training import settle

from ..compare import build, cost
from ..compare.run import Job, finished, run
from ..compare.variants import Setting, Variant

#: The verdict on a difference whose interval contains zero.
NOT_SIGNIFICANT = "not significant"
#: Student's t at 95 %, by the number of differences minus one.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row: its name, the model and attention that are trained, and changes of the recipe.

    It is compared with the row `against` of its part; empty for a baseline.
    """

    row: str
    model: str
    attention: str
    against: str = ""
    patch: int | None = None
    changes: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows that belong to one question."""

    title: str
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Study:
    """`every` takes one in so many of the training images, resized to `side` pixels; `timed`: rows are also timed."""

    name: str
    table: str
    parts: tuple[Part, ...]
    recipe: str
    side: int
    every: int
    seeds: tuple[int, ...] = (0, 1, 2)
    timed: bool = False

    def runs(self) -> Iterator[tuple[Part, Entry, int]]:
        """Every run, the most informative first: part by part, all rows of one seed before the next."""
        for part in self.parts:
            for seed in self.seeds:
                for entry in part.entries:
                    yield part, entry, seed

    def variant(self, entry: Entry, out: Path) -> Variant:
        text = ",".join(filter(None, [self.recipe, entry.changes]))
        return Variant(
            Setting(entry.model, str(out / "pictures"), settle(text, {"seed": 0}), entry.patch, text), entry.attention
        )


_STUDIES: dict[str, Study] = {}


def register_study(study: Study) -> Study:
    _STUDIES[study.table] = study
    return study


def study(table: str) -> Study:
    if table not in _STUDIES:
        raise unknown("table with a study at small scale", table, _STUDIES)
    return _STUDIES[table]


def studies() -> dict[str, Study]:
    return dict(_STUDIES)


# Execution -----------------------------------------------------------------------------------------------------------


def carry_out(
    study: Study, data: str, out: Path, *, minutes: float = math.inf, say: Callable[[str], None] = lambda text: None
) -> None:
    """Execute the missing runs in `out`. No run starts after `minutes`; a started run is finished.

    Several processes may execute the same command at once: each takes runs that no other process is executing.
    """
    began = time.monotonic()
    with only_run(out / "pictures"):
        small_pictures(study, data, out / "pictures", say)
    # A model that occurs in several parts is trained once, in the first of them.
    every: dict[Path, tuple[Part, Entry, int]] = {}
    for part, entry, seed in study.runs():
        every.setdefault(_folder(study, out, entry, seed), (part, entry, seed))
    todo = [(folder, *one) for folder, one in every.items() if finished(folder) is None]
    say(f"{study.name}: {len(todo)} of {len(every)} runs to do")
    for number, (folder, part, entry, seed) in enumerate(todo, start=1):
        if time.monotonic() - began > 60 * minutes:
            say("the time limit is reached; the same command continues")
            return
        try:
            with only_run(out / "claims" / folder.relative_to(out)):
                if finished(folder) is not None:
                    continue
                outcome = run(Job(study.variant(entry, out), seed, str(folder)))
        except Held:
            continue
        if outcome.result is None:
            raise UserError(f"{part.title}, {entry.row}, seed {seed}: {outcome.reason}. The same command continues")
        told = f"{outcome.result['top1']:.2f} % after {outcome.result['seconds']:.0f} s"
        say(f"{number}/{len(todo)} {entry.row} ({entry.model}), seed {seed}: {told}")
    left = sum(finished(folder) is None for folder in every)
    if left:
        say(f"{left} of {len(every)} runs belong to another process; if it has ended, the same command continues")
    elif study.timed:
        with only_run(out):
            _race(study, out, say)


def small_pictures(study: Study, data: str, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Write the resized images of the study once, because small files load faster."""
    if (folder / "made.json").is_file():
        return
    counts = {}
    for split, every in (("train", study.every), ("val", 1)):
        source = open_data(data, split)  # type: ignore[arg-type]
        if not source.classes:
            raise UserError(f"--data {data!r} has images without labels: a study requires one folder per class")
        say(f"writing {len(range(0, len(source), every)):,} {split} images of {study.side} px, once")
        counts[split] = 0
        for index in range(0, len(source), every):
            try:
                image, label = source[index]
            except BadImage:
                continue
            place = folder / split / source.classes[label]
            place.mkdir(parents=True, exist_ok=True)
            image.resize((study.side, study.side), Image.Resampling.BICUBIC).save(place / f"{index:06d}.png")
            counts[split] += 1
    with atomic(folder / "made.json") as temporary:
        temporary.write_text(json.dumps(counts))


def _folder(study: Study, out: Path, entry: Entry, seed: int) -> Path:
    return out / study.variant(entry, out).folder / f"seed-{seed}"


def _race(study: Study, out: Path, say: Callable[[str], None]) -> None:
    """Measure the latency of every row without one; rows of one model and patch size share an interleaved benchmark."""
    classes = len(open_data(out / "pictures", "train").classes)
    groups: dict[Setting, list[Variant]] = {}
    for part in study.parts:
        for entry in part.entries:
            variant = study.variant(entry, out)
            if cost.measured(out / variant.folder) is None:
                groups.setdefault(variant.setting, []).append(variant)
    for variants in groups.values():
        cost.measure(variants, out, classes, factors=(1,), say=say)


# Results -------------------------------------------------------------------------------------------------------------


def gather(study: Study, out: Path) -> dict[str, Any]:
    """The results in the folder as plain data: a row for every entry, with its finished runs."""
    rows = []
    for part in study.parts:
        for entry in part.entries:
            done = {seed: finished(_folder(study, out, entry, seed)) for seed in study.seeds}
            runs = [
                {"seed": seed, "top1": r["top1"], "seconds": r["seconds"]} for seed, r in done.items() if r is not None
            ]
            timings = cost.measured(out / study.variant(entry, out).folder) if study.timed else None
            timing = {name: timings["row"][name] for name in ("latency_ms", "speedup", "macs")} if timings else {}
            model = build.build(study.variant(entry, out), 10)
            rows.append(
                {"part": part.title, **dataclasses.asdict(entry), "params": parameters(model), "runs": runs, **timing}
            )
    made = json.loads((out / "pictures" / "made.json").read_text())
    about = {"study": study.name, "table": study.table, "recipe": study.recipe, "side": study.side, "pictures": made}
    return {**about, "seeds": list(study.seeds), "stamp": stamp(), "rows": rows}


def write(results: Mapping[str, Any], path: Path) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class Summary:
    """Top-1 of a row over its seeds; `difference` to its baseline, paired by seed, and `reach`, half the width of the
    95 % interval. None: too few runs."""

    runs: int
    mean: float | None
    deviation: float | None
    difference: float | None = None
    reach: float | None = None

    @property
    def verdict(self) -> str:
        if self.difference is None or self.reach is None:
            return "–"
        if abs(self.difference) <= self.reach:
            return NOT_SIGNIFICANT
        return "better" if self.difference > 0 else "worse"


def summarise(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Summary:
    """The summary of one row of `gather`, given all rows."""
    mine = {run["seed"]: run["top1"] for run in row["runs"]}
    values = list(mine.values())
    mean = statistics.fmean(values) if values else None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    other = next((r for r in rows if r["part"] == row["part"] and r["row"] == row["against"]), None)
    theirs = {run["seed"]: run["top1"] for run in other["runs"]} if other else {}
    pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if not pairs:
        return Summary(len(values), mean, deviation)
    reach = _T[len(pairs) - 2] * statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    return Summary(len(values), mean, deviation, statistics.fmean(pairs), reach)
