"""The measurements of one `optimize`: readings and timings, each made once and logged, and the outcomes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import UserError
from ..measure.clock import Call, Comparison
from .block_times import repeat_to_batch
from .goals import Goal
from .judge import UNCHANGED, Judgement, typical_drops
from .measuring import benchmark, forward_call, read_one
from .outcomes import Outcome
from .pace import Deadline, Pace
from .results import Timing
from .scoring import Scoring
from .search import Search, silent
from .variants import EAGER, Prepared, Variant, Workshop


class Session:
    """Judges and times variants.

    Args:
        original: the unmodified model in eager fp32.
        workshop: prepares variants.
        search: settings, log and progress.
        goal, pace, deadline: what to reach, and how long it may take.
        images: the images of the choice, and the original's outputs for them.
        scoring: how outputs are scored.
    """

    def __init__(
        self,
        original: Variant,
        workshop: Workshop,
        search: Search,
        goal: Goal,
        pace: Pace,
        deadline: Deadline,
        images: Tensor,
        belief: Tensor,
        scoring: Scoring,
    ) -> None:
        self.original, self.workshop, self.search, self.goal = original, workshop, search, goal
        self.pace, self.deadline, self.images, self.belief = pace, deadline, images, belief
        self.uncalibrated = scoring
        self.readings: dict[Variant, tuple[list[Any], float]] = {}
        self.comparisons = {original: Comparison(1.0, (1.0, 1.0), (1.0, 1.0), 0)}
        # Of the last benchmark: ratios of several benchmarks can be compared, milliseconds of a busy machine cannot.
        self.original_ms = 0.0
        self.notes: list[str] = []
        self._prepared: dict[Variant, Prepared] = {}

    def prepare(self, variant: Variant) -> Prepared:
        if variant not in self._prepared:
            progress = self.search.progress if variant.target.format else silent  # PyTorch takes no time
            with progress(f"preparing {variant}", 1) as step:
                self._prepared[variant] = self.workshop.prepare(variant)
                step(1)
        return self._prepared[variant]

    def release(self) -> None:
        """Close all files but those of the original model."""
        self._prepared = {one: made for one, made in self._prepared.items() if one == self.original}

    def read(self, variants: Sequence[Variant]) -> list[Variant]:
        """Read the outputs of variants on the images of the choice; returns those that could be read."""
        done = []
        with self.search.progress(f"judging {len(variants)} on {len(self.images)} images", len(variants)) as step:
            for variant in variants:
                with self._left_out(variant):
                    name = f"predictions and divergence of {variant}, choosing {len(self.images)}"
                    self.readings[variant] = self.search.log.get(name, partial(self._read, variant))
                    done.append(variant)
                step(1)
        return done

    def _read(self, variant: Variant) -> tuple[list[Any], float]:
        run = self.prepare(variant).run
        return read_one(run, self.images, self.belief, str(variant), lambda done: None, self.uncalibrated.read)

    def time(self, variants: Sequence[Variant]) -> None:
        """Time variants in one benchmark, interleaved with the original model."""
        name = f"timing at batch {self.search.batch} of {', '.join(map(str, variants))}"
        found = self.search.log.get(name, lambda: self._time(variants))
        self.original_ms = found["original_ms"]
        for variant, (ratio, quartiles, interval, pairs) in zip(variants, found["compared"], strict=True):
            self.comparisons[variant] = Comparison(ratio, tuple(quartiles), tuple(interval), pairs)

    def _time(self, variants: Sequence[Variant]) -> dict[str, Any]:
        batch = repeat_to_batch(self.images, self.search.batch)
        calls: dict[str, Call] = {
            str(one): forward_call(self.prepare(one).once, batch) for one in (self.original, *variants)
        }
        times = benchmark(calls, self.pace.timing * len(variants), self.search.progress)
        base = str(self.original)
        compared = [dataclasses.astuple(times.compare(str(one), base)) for one in variants]
        return {"original_ms": 1e3 * times.median(base) / self.search.batch, "compared": compared}

    @contextmanager
    def _left_out(self, variant: Variant) -> Iterator[None]:
        """Note the failure of one variant, in place of ending the search."""
        try:
            yield
        except (UserError, RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            self.notes.append(f"left out: {variant}: {reason}")

    @property
    def scoring(self) -> Scoring:
        """The scoring, calibrated by everything that was read so far."""
        return self.uncalibrated.calibrated(self.belief, [reading for reading, _ in self.readings.values()])

    def judgements(self) -> dict[Variant, tuple[Judgement, float]]:
        """The judgement and the typical drop of everything that was read."""
        scoring = self.scoring
        judged = {one: scoring.judge(self.belief, reading) for one, (reading, _) in self.readings.items()}
        far = [divergence for _, divergence in self.readings.values()]
        typical = typical_drops([one.expected_drop for one in judged.values()], far)
        return {one: (found, drop) for (one, found), drop in zip(judged.items(), typical, strict=True)}

    def outcomes(self) -> list[Outcome]:
        """Everything that was timed, the original model first."""
        judged = self.judgements()
        found = []
        for variant, comparison in self.comparisons.items():
            judgement, typical = judged.get(self.judged_as(variant), (UNCHANGED, 0.0))
            timing = Timing(comparison, self.original_ms)
            found.append(Outcome(variant=variant, judged=judgement, typical_drop=typical, timed=timing))
        return found

    def judged_as(self, variant: Variant) -> Variant:
        """The variant whose outputs are read in place of another's: in fp32 every runtime computes the same."""
        return Variant(variant.change, EAGER) if variant.target.precision == "fp32" else variant

    def is_exact(self, variant: Variant) -> bool:
        """Whether a variant computes what the original does, up to rounding."""
        return variant.target.precision == "fp32" and not variant.change

    def measure(self, variants: Iterable[Variant], share: float) -> list[Variant]:
        """Prepare, judge and time variants, until `share` of the budget has passed; returns those that were."""
        ready = list[Variant]()
        for variant in variants:
            if ready and self.deadline.passed(share):
                self.notes.append(f"left out, because the time budget was used up: {variant}")
                continue
            with self._left_out(variant):
                needed = self.judged_as(variant)
                if not self.is_exact(variant) and needed not in self.readings and not self.read([needed]):
                    continue
                self.prepare(variant)
                ready.append(variant)
        if ready or not self.original_ms:
            self.time(ready)
        return ready
