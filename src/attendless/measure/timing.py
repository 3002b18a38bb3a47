"""Timing the variants of one image size: memory first, then the interleaved benchmark, then each model alone."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attention import Macs
from ..errors import UserError
from ..integrations.weights import check_finite
from ..plugins import refuse_while_loading
from ..sizes import size_text
from ..stamp import stamp
from .clock import Call, Timer, Timings, device_timer, interleave
from .macs import count
from .memory import Memory, MemoryFull, available
from .memory_check import check_room, stand_in, told_if_full
from .parts import Parts, parts
from .subject import Subject, images_for
from .throughput import best_batch

#: The baseline's name in an interleaved benchmark.
BASELINE = "baseline"
#: Seconds that starting a process, importing PyTorch in it and building a model take, roughly.
_CHILD = 6.0


@dataclasses.dataclass(frozen=True)
class Conditions:
    """How to measure.

    Attributes:
        batch: Images per call.
        threads: CPU threads; None leaves PyTorch's setting.
        compile: Whether every model is compiled with `torch.compile`.
        budget: Seconds of interleaved timing per variant.
        memory, throughput, parts: Whether these are measured as well.
        seed: Seed of the order in which the variants are called.
        progress: Called with a line of text at the beginning of each step.
        announce: Called with a size and the baseline's MACs before anything is measured at that size; the MACs are None
            if only running the model can count them.
    """

    batch: int = 1
    threads: int | None = None
    compile: bool = False
    budget: float = 10.0
    memory: bool = True
    throughput: bool = True
    parts: bool = True
    seed: int = 0
    progress: Callable[[str], None] = lambda text: None
    announce: Callable[[tuple[int, int], Macs | None], None] = lambda size, macs: None

    def __post_init__(self) -> None:
        if self.batch < 1 or not 0 < self.budget < math.inf or (self.threads is not None and self.threads < 1):
            given = f"batch={self.batch}, budget={self.budget}, threads={self.threads}"
            raise UserError(f"{given}: expected a batch and threads of at least 1 and a budget of more than 0 seconds")

    def seconds(self, variants: int, sizes: int = 1) -> float:
        """An upper estimate of the seconds that measuring so many variants at so many sizes takes."""
        alone = _CHILD * self.memory + self.budget * self.throughput + self.budget / 2 * self.parts
        return sizes * (self.budget * variants + alone * (variants + 1))


@dataclasses.dataclass(frozen=True)
class Alone:
    """What is measured of one model outside the interleaved benchmark."""

    memory: Memory | None = None
    rate: tuple[int | None, float | None] = (None, None)
    parts: Parts | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Timed:
    """One variant's results, before MACs are counted."""

    subject: Subject
    baseline: nn.Module
    baseline_macs: Macs | None
    size: tuple[int, int]
    timings: Timings
    place: str
    alone: Alone
    baseline_alone: Alone
    stamp: dict[str, Any]
    #: The baseline's name in the benchmark, and the runtime of both models.
    against: str = BASELINE
    runtime: str = "eager"


def announced(baseline: nn.Module, size: tuple[int, int], how: Conditions) -> Macs | None:
    """The baseline's MACs by formula, announced before any timing. Raises if the batch does not fit into memory."""
    refuse_while_loading("a measurement")
    check_room(baseline, size, how.batch)
    macs = by_formula(baseline, size)
    how.announce(size, macs)
    return macs


def time_all(
    subjects: Sequence[Subject], baseline: Subject, size: tuple[int, int], how: Conditions, baseline_macs: Macs | None
) -> list[Timed]:
    """Time the subjects against the baseline, interleaved. `baseline_macs` is what `announced` returned."""
    where = f"at {size_text(size)} px"
    places = {BASELINE: baseline} | {str(i): subject for i, subject in enumerate(subjects)}
    memories: dict[str, Memory | str] = {}
    for place, subject in places.items():
        if how.memory:
            how.progress(f"memory of {_label(place, subject)} {where}")
            memories[place] = _memory(subject, size, how)
    models = {place: subject.model for place, subject in places.items()}
    with evaluating(models.values()), torch.inference_mode(), told_if_full(size, how.batch):
        how.progress(f"timing {len(models)} models {where}")
        images = images_for(baseline.model, size, how.batch)
        calls = {place: _call(model, images, how) for place, model in models.items()}
        for place, call in calls.items():
            check_answer(call(), f"{_label(place, places[place])} {where}")
        device = next(baseline.model.parameters()).device
        timer = device_timer(device)
        timings = interleave(calls, timer=timer, budget=how.budget * len(subjects), seed=how.seed)
        alone = {}
        for place, model in models.items():
            if how.throughput or how.parts:
                how.progress(f"batches and parts of {_label(place, places[place])} {where}")
            alone[place] = _measure_alone(model, images, memories.get(place), timings.median(place), how)
        if how.throughput:
            how.progress(f"throughput of {len(models)} models {where}")
            alone = _with_rates(alone, models, size, how, timer)
    marks = stamp(device)
    return [
        Timed(
            subject=places[place],
            baseline=baseline.model,
            baseline_macs=baseline_macs,
            size=size,
            timings=timings,
            place=place,
            alone=alone[place],
            baseline_alone=alone[BASELINE],
            stamp=marks,
        )
        for place in models
        if place != BASELINE
    ]


def _memory(subject: Subject, size: tuple[int, int], how: Conditions) -> Memory | str:
    """The measured memory, or the reason why there is none."""
    try:
        return subject.memory(size, batch=how.batch, threads=how.threads)
    except MemoryFull:  # this process would run out of memory too
        raise
    except UserError as error:
        return str(error)


def _measure_alone(
    model: nn.Module, images: Tensor, memory: Memory | str | None, seconds: float, how: Conditions
) -> Alone:
    """Memory, best batch and parts of one model. `seconds` is the latency in the interleaved benchmark."""
    size = (images.shape[-2], images.shape[-1])
    found = Alone(memory, note="") if not isinstance(memory, str) else Alone(note=memory)
    if how.throughput:
        timer = device_timer(images.device)
        limit = _largest_batch(found.memory, images.device, how.batch)
        # Every batch would compile anew, so the search runs uncompiled and only its result is measured compiled.
        eager = dataclasses.replace(how, compile=False)
        batch, rate = best_batch(
            lambda b: _call(model, images_for(model, size, b), eager), timer, limit=limit, budget=how.budget
        )
        found = dataclasses.replace(found, rate=(batch, rate))
    if how.parts:
        rounds = max(1, min(8, int(how.budget / 2 / (2 * seconds))))
        measured = parts(model, images, budget=how.budget / 2, rounds=rounds)
        if not how.compile:  # the parts are those of the eager model
            measured = measured.scaled(1e3 * seconds)
        found = dataclasses.replace(found, parts=measured)
    return found


def _with_rates(
    alone: Mapping[str, Alone], models: Mapping[str, nn.Module], size: tuple[int, int], how: Conditions, timer: Timer
) -> dict[str, Alone]:
    """The same with images per second from one interleaved benchmark, each model at its best batch: rates measured one
    after the other differ under load even if the models are equal."""
    batches = {place: found.rate[0] or 1 for place, found in alone.items()}
    images: dict[int, Tensor] = {}
    for place, batch in batches.items():
        images.setdefault(batch, images_for(models[place], size, batch))
    calls = {place: _call(models[place], images[batch], how) for place, batch in batches.items()}
    timed = interleave(calls, timer=timer, budget=how.budget * len(calls) / 2, rounds=5, max_rounds=5, seed=how.seed)
    return {
        place: dataclasses.replace(found, rate=(batches[place], batches[place] / timed.median(place)))
        for place, found in alone.items()
    }


def _call(model: nn.Module, images: Tensor, how: Conditions) -> Call:
    run = torch.compile(model, dynamic=False) if how.compile else model

    def forward() -> object:
        with torch.inference_mode():
            return run(images)

    return forward


def _largest_batch(memory: Memory | None, device: torch.device, batch: int, ceiling: int = 256) -> int:
    """The largest batch whose activations, by the measured ones, fit into half of what the system has left.

    An accelerator raises an error when its memory is full.
    """
    left = available()
    if memory is None or left is None or device.type != "cpu":
        return ceiling
    image = max(memory.peak - memory.weights, 1.0) / batch
    return max(1, min(ceiling, int(left / 1e6 / 2 / image)))


def by_formula(baseline: nn.Module, size: tuple[int, int]) -> Macs | None:
    """The MACs of a model that an attendless backbone can describe; None if only running the model can count them."""
    counted = stand_in(baseline)
    return None if counted is None else count(counted, size)


def check_answer(answer: Any, whose: str) -> None:
    """Raise if the model's output holds NaN or infinity: such a model is not timed."""
    leaves = (leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor))
    check_finite((("its output", leaf) for leaf in leaves), f"{whose} cannot be measured")


def _label(place: str, subject: Subject) -> str:
    return "the baseline" if place == BASELINE else subject.label


@contextlib.contextmanager
def evaluating(models: Any) -> Iterator[None]:
    """Put the models into evaluation mode for the length of the block."""
    modes = [(model, model.training) for model in models]
    try:
        for model, _ in modes:
            model.eval()
        yield
    finally:
        for model, training in modes:
            model.train(training)
