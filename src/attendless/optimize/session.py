"""The measurements of one `optimize`: readings and timings, each made once and logged, and the outcomes of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import UserError
from ..measure.clock import Call, Comparison, Timings, device_timer
from ..measure.precision import saturates
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

#: How the note on a variant begins that was not tried for lack of time.
LATE = "left out, because the time budget was used up: "
#: So many of them are named.
_NAMED = 2


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
        self.uncalibrated = scoring.against(belief)
        self.readings: dict[Variant, tuple[list[Any], float]] = {}
        self.comparisons = {original: Comparison(1.0, (1.0, 1.0), (1.0, 1.0), 0)}
        # Of the last benchmark: ratios of several benchmarks can be compared, milliseconds of a busy machine cannot.
        self.original_ms = 0.0
        self.notes: list[str] = []
        self._prepared: dict[Variant, Prepared] = {}
        self._counted = 0  # variants that one call of `measure` prepared

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
        done = list[Variant]()
        if not variants:
            return done
        most = max(map(self._count, variants))
        names = {one: f"predictions and divergence of {_name(one)}, choosing {self._count(one)}" for one in variants}
        ready = list[Variant]()
        for variant in variants:
            with self._left_out(variant):
                if names[variant] not in self.search.log:
                    self.prepare(variant)
                ready.append(variant)
        with self.search.progress(f"judging {len(variants)} on {most} images", len(variants)) as step:
            for variant in ready:
                with self._left_out(variant):
                    self.readings[variant] = self.search.log.get(names[variant], partial(self._read, variant))
                    done.append(variant)
                step(1)
        return done

    def _read(self, variant: Variant) -> tuple[list[Any], float]:
        run, scoring, count = self.prepare(variant).run, self.uncalibrated, self._count(variant)
        images, belief = self.images[:count], self.belief[:count]
        return read_one(run, images, belief, str(variant), lambda done: None, scoring.read, scoring.distance)

    def _count(self, variant: Variant) -> int:
        """The number of images on which a variant is read: the first ones, if PyTorch runs it."""
        return len(self.images[: (not variant.target.format and self.pace.in_pytorch) or None])

    def time(self, variants: Sequence[Variant], stage: str = "timing") -> None:
        """Time variants, by default the original alone, in one benchmark, interleaved with the original model.

        Timings in the log are not repeated.
        """
        variants = variants or [self.original]
        log, names = self.search.log, {one: f"{stage} at batch {self.search.batch} of {_name(one)}" for one in variants}
        missing = [one for one in variants if names[one] not in log]
        if missing:
            measured = self._time(missing)
            for one, compared in zip(missing, measured["compared"], strict=True):
                log.get(names[one], partial(dict, original_ms=measured["original_ms"], compared=compared))
        for one in variants:
            found = log.values[names[one]]
            ratio, quartiles, interval, pairs = found["compared"]
            self.comparisons[one] = Comparison(ratio, tuple(quartiles), tuple(interval), pairs)
            self.original_ms = found["original_ms"]

    def time_again(self, variants: Sequence[Variant]) -> None:
        """Time variants in one benchmark as `time` does, without the log."""
        measured = self._time([self.original, *variants])
        self.original_ms = measured["original_ms"]
        for one, compared in zip([self.original, *variants], measured["compared"], strict=True):
            self.comparisons[one] = Comparison(*compared)

    def _time(self, variants: Sequence[Variant]) -> dict[str, Any]:
        ready = {_name(one): self.prepare(one) for one in (self.original, *variants)}
        times = self._benchmark(ready, self.pace.timing * max(1, len(ready) - 1))
        base = _name(self.original)
        compared = [dataclasses.astuple(times.compare(_name(one), base)) for one in variants]
        return {"original_ms": 1e3 * times.median(base) / self.search.batch, "compared": compared}

    def _benchmark(self, ready: Mapping[str, Prepared], seconds: float) -> Timings:
        batch = repeat_to_batch(self.images, self.search.batch)
        calls: dict[str, Call] = {name: forward_call(one.once, batch) for name, one in ready.items()}
        return benchmark(calls, seconds, self.search.progress, device_timer(batch.device))

    def pays(self, variant: Variant) -> bool:
        """Whether the unmodified model in int8 is faster than in fp32, by a quick calibration; others always do."""
        if variant.change or variant.target.precision != "int8" or variant.target.dynamic:
            return True
        if self.pace.quick:  # without VNNI, int8 is seldom faster
            gain = 0.0 if saturates() else 2.0
        else:
            gain = self.search.log.get(f"gain by int8 of {_name(variant)}", partial(self._gain, variant))
        if gain <= 1:
            found = "is not tried without VNNI instructions" if not gain else f"is {gain:.2f}× as fast as fp32 here"
            self.notes.append(f"left out: {variant}: int8 {found}")
        return gain > 1

    def _gain(self, variant: Variant) -> float:
        assert variant.source is not None
        ready = {"int8": self.workshop.hasty(variant), "fp32": self.prepare(variant.source)}
        return self._benchmark(ready, self.pace.timing).compare("int8", "fp32").ratio

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

    def measure(
        self, variants: Iterable[Variant], share: float, *, forced: bool = False, at_least: int = 1
    ) -> list[Variant]:
        """Prepare, judge and time variants; returns those that could be.

        Args:
            variants: those to measure, the most promising first.
            share: after this share of the budget no further variant is prepared. The log says which were, so that a
                search that resumes ends as the first would have.
            forced: int8 variants are measured even where int8 is slower than fp32.
            at_least: so many are measured whatever the time.
        """
        wanted = {_name(one): one for one in variants}
        digest = hashlib.blake2b("\n".join(wanted).encode(), digest_size=8).hexdigest()
        told = len(self.notes)

        def prepared() -> dict[str, list[str]]:
            ready = [name for name in wanted if self._ready(wanted[name], share, forced, at_least)]
            return {"ready": ready, "notes": self.notes[told:]}

        self._counted = 0
        found = self.search.log.get(f"measured of {digest}", prepared)
        self.notes[told:] = found["notes"]
        ready = [wanted[name] for name in found["ready"]]
        needed = [self.judged_as(one) for one in ready if not self.is_exact(one)]
        self.read([one for one in dict.fromkeys(needed) if one not in self.readings])
        if ready or not self.original_ms:
            self.time(ready)
        return ready

    def _ready(self, variant: Variant, share: float, forced: bool, at_least: int) -> bool:
        """Prepare and judge a variant; whether it can be timed."""
        if self._counted >= at_least and self.deadline.passed(share):
            self.notes.append(f"{LATE}{variant}")
            return False
        with self._left_out(variant):
            if not forced and not self.pays(variant):
                return False
            needed = self.judged_as(variant)
            if not self.is_exact(variant) and needed not in self.readings and not self.read([needed]):
                return False
            self.prepare(variant)
            self._counted += 1
            return True
        return False


def grouped(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes, each once, with the number of variants for which there was no time in one of them."""
    found = list(dict.fromkeys(notes))
    late = [note.removeprefix(LATE) for note in found if note.startswith(LATE)]
    found = [note for note in found if not note.startswith(LATE)]
    if len(late) > _NAMED:
        late = [*late[:_NAMED], f"and {len(late) - _NAMED} more variants"]
    return tuple(found + [f"{LATE}{'; '.join(late)}"] * bool(late))


def _name(variant: Variant) -> str:
    """The variant's name in the log: the key distinguishes layers in floating point."""
    return f"{variant} {variant.key}" if variant.target.dynamic else str(variant)
