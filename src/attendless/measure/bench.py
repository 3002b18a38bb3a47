"""`bench`: what a model that attends less gains against the dense model, measured here and now.

The order matters. The cap comes first, by formula, wherever there is one; then memory, in processes of their own; then
the contestants race; then each is looked at alone, for its best batch and its parts. Multiply-accumulates for which
there is no formula come last, because counting them by running can make compiled models slow ever after
(pytorch#140909).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, Macs, cap
from ..backbones import is_host
from ..convert.architecture import describe, describes
from ..errors import UserError
from ..sizes import input_size, model_name, parse_size
from ..stamp import stamp
from .cap import time_share
from .clock import Call, Race, device_timer, race
from .macs import count
from .memory import Memory, available
from .parts import Parts, parts
from .row import Measurement
from .subject import Subject, attention_of, converted, described, images_for, named, original, resized
from .throughput import best_batch

Size = int | tuple[int, int] | str
_DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class Conditions:
    """How to measure. `budget` is the seconds each contestant may race; what is switched off is left out of the row.

    `progress` is told each step as it begins, `announce` what the dense model costs at a size, before it is measured.
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
    announce: Callable[[tuple[int, int], Macs], None] = lambda size, macs: None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.budget <= 0 or (self.threads is not None and self.threads < 1):
            given = f"batch={self.batch}, budget={self.budget}, threads={self.threads}"
            raise UserError(f"{given}: expected a batch and threads of at least 1 and a budget of more than 0 seconds")


_DEFAULT = Conditions()


@dataclasses.dataclass(frozen=True)
class _Alone:
    """What is measured of one model alone."""

    memory: Memory | None = None
    rate: tuple[int | None, float | None] = (None, None)
    parts: Parts | None = None
    note: str = ""


def bench(
    model: nn.Module,
    like: nn.Module | None = None,
    *,
    size: Size | None = None,
    name: str | None = None,
    **settings: Any,
) -> Measurement:
    """Measure `model` against the dense model `like`; without one, against the timm model it came from.

    `settings` are those of `Conditions`: `batch`, `threads`, `compile`, `budget`, `seed`, and `memory`, `throughput` or
    `parts` to leave one out. Print the result for a summary; `as_dict()` is its JSON.
    """
    return bench_all([model], like, size=size, name=name, **settings)[0]


def bench_all(
    models: Sequence[nn.Module],
    like: nn.Module | None = None,
    *,
    size: Size | None = None,
    name: str | None = None,
    **settings: Any,
) -> list[Measurement]:
    """As `bench`, for several models that race together: their times belong to the same minutes of one machine."""
    how = Conditions(**settings)
    dense = like if like is not None else original(models[0])
    pixels = parse_size(size) if size is not None else input_size(models[0])
    *sized, dense = (m if input_size(m) == pixels else resized(m, pixels) for m in (*models, dense))
    with _threads(how.threads):
        timed = _time([described(model) for model in sized], described(dense), pixels, how)
        return [_row(result, name or model_name(models[0]), how) for result in timed]


def bench_rows(
    model: str,
    attentions: Sequence[str] = (),
    sizes: Sequence[Size] = (),
    how: Conditions = _DEFAULT,
    **opening: Any,
) -> Iterator[Measurement]:
    """One row for every size and attention of a model opened by name (or file); `opening` goes to `open_model`.

    The contestants of one size race together, against one dense model, and their rows come as soon as they are known.
    Without attentions a file is measured as it is, and a model of timm's with `full`.
    """
    waiting: list[_Timed] = []
    with _threads(how.threads):
        for size in sizes or (None,):
            dense, asked = named(model, size=size, **opening), attentions or ("full",)
            if converted(dense.model):  # a file or a model of ours
                asked = attentions or (dense.attention,)
                dense = described(original(dense.model))
            subjects = [named(model, attention=text, size=size, **opening) for text in asked]
            timed = _time(subjects, dense, input_size(dense.model), how)
            if how.compile and timed[0].dense_macs is None:  # counted by running, which must come after all timing
                waiting += timed
            else:
                yield from (_row(result, str(model), how) for result in timed)
        yield from (_row(result, str(model), how) for result in waiting)


# Timing --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Timed:
    """One contestant's results before anything is counted."""

    subject: Subject
    dense: nn.Module
    dense_macs: Macs | None
    size: tuple[int, int]
    race: Race
    place: str
    alone: _Alone
    dense_alone: _Alone
    stamp: dict[str, Any]


def _time(subjects: Sequence[Subject], dense: Subject, size: tuple[int, int], how: Conditions) -> list[_Timed]:
    where = f"at {size[0]}x{size[1]}"
    dense_macs = _by_formula(dense.model, size)
    if dense_macs is not None:
        how.announce(size, dense_macs)
    places = {_DENSE: dense} | {str(i): subject for i, subject in enumerate(subjects)}
    memories: dict[str, Memory | str] = {}
    for place, subject in places.items():
        if how.memory:
            how.progress(f"memory of {_label(place, subject)} {where}")
            memories[place] = _memory(subject, size, how)
    models = {place: subject.model for place, subject in places.items()}
    with _evaluating(models.values()), torch.inference_mode():
        how.progress(f"timing {len(models)} models {where}")
        calls = {place: _call(model, images_for(model, size, how.batch), how) for place, model in models.items()}
        device = next(dense.model.parameters()).device
        timer = device_timer(device)
        raced = race(calls, timer=timer, budget=how.budget * len(subjects), seed=how.seed)
        alone = {}
        for place, model in models.items():
            if how.throughput or how.parts:
                how.progress(f"batches and parts of {_label(place, places[place])} {where}")
            alone[place] = _measure_alone(model, size, memories.get(place), raced.median(place), how)
    marks = stamp(device)
    return [
        _Timed(places[place], dense.model, dense_macs, size, raced, place, alone[place], alone[_DENSE], marks)
        for place in models
        if place != _DENSE
    ]


def _memory(subject: Subject, size: tuple[int, int], how: Conditions) -> Memory | str:
    """The measured memory, or why there is none."""
    try:
        return subject.memory(size, batch=how.batch, threads=how.threads)
    except UserError as error:
        return str(error)


def _measure_alone(
    model: nn.Module, size: tuple[int, int], memory: Memory | str | None, seconds: float, how: Conditions
) -> _Alone:
    """`seconds` is what a call takes."""
    images = images_for(model, size, how.batch)
    found = _Alone(memory, note="") if not isinstance(memory, str) else _Alone(note=memory)
    if how.throughput:
        timer = device_timer(images.device)
        limit = _largest_batch(found.memory, images.device, how.batch)
        # Every batch would compile anew, so the search runs uncompiled and only its result is measured compiled.
        eager = dataclasses.replace(how, compile=False)
        batch, rate = best_batch(
            lambda b: _call(model, images_for(model, size, b), eager), timer, limit=limit, budget=how.budget
        )
        if how.compile:
            call = _call(model, images_for(model, size, batch), how)
            rate = batch / race({"alone": call}, timer=timer, budget=how.budget, rounds=5).median("alone")
        found = dataclasses.replace(found, rate=(batch, rate))
    if how.parts:
        rounds = max(1, min(8, int(how.budget / 2 / (2 * seconds))))
        found = dataclasses.replace(found, parts=parts(model, images, budget=how.budget / 2, rounds=rounds))
    return found


def _call(model: nn.Module, images: Tensor, how: Conditions) -> Call:
    run = torch.compile(model, dynamic=False) if how.compile else model

    def forward() -> object:
        with torch.inference_mode():
            return run(images)

    return forward


def _largest_batch(memory: Memory | None, device: torch.device, batch: int, ceiling: int = 256) -> int:
    """The largest batch whose activations, by the measured ones, fit into half of what the system has left.

    An accelerator says by itself when its memory is full.
    """
    left = available()
    if memory is None or left is None or device.type != "cpu":
        return ceiling
    image = max(memory.peak - memory.weights, 1.0) / batch
    return max(1, min(ceiling, int(left / 1e6 / 2 / image)))


# Counting and writing down -------------------------------------------------------------------------------------------


def _by_formula(dense: nn.Module, size: tuple[int, int]) -> Macs | None:
    """The multiply-accumulates of a model that one of our hosts can stand for; None if only running it would tell."""
    if is_host(dense):
        return count(dense, size)
    if not describes(dense):
        return None
    try:
        with torch.device("meta"):
            return count(describe(dense).build(), size)
    except UserError:
        return None


def _row(timed: _Timed, name: str, how: Conditions) -> Measurement:
    model: Any = timed.subject.model
    compared = timed.race.compare(timed.place, _DENSE)
    dense_macs = timed.dense_macs or count(timed.dense, timed.size)
    path, reason = _path(model, how.batch)
    alone, dense = timed.alone, timed.dense_alone
    of_time = time_share(dense.parts.ms) if dense.parts else None
    return Measurement(
        model=name,
        attention=timed.subject.attention,
        size=timed.size,
        tokens=model.grid(timed.size).tokens if hasattr(model, "grid") else None,
        batch=how.batch,
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=count(model, timed.size),
        latency_ms=1e3 * timed.race.median(timed.place),
        dense_latency_ms=1e3 * timed.race.median(_DENSE),
        speedup=compared.ratio,
        spread=compared.spread,
        quartiles=compared.quartiles,
        pairs=compared.pairs,
        distinguishable=compared.distinguishable,
        best_batch=alone.rate[0],
        throughput=alone.rate[1],
        dense_best_batch=dense.rate[0],
        dense_throughput=dense.rate[1],
        peak_memory_mb=alone.memory.peak if alone.memory else None,
        dense_peak_memory_mb=dense.memory.peak if dense.memory else None,
        process_memory_mb=alone.memory.process if alone.memory else None,
        attention_share=dense_macs.share,
        cap=dense_macs.cap,
        time_share=of_time,
        time_cap=cap(of_time) if of_time is not None else None,
        parts_ms=alone.parts.ms if alone.parts else None,
        dense_parts_ms=dense.parts.ms if dense.parts else None,
        whole_ms=alone.parts.whole_ms if alone.parts else None,
        dense_whole_ms=dense.parts.whole_ms if dense.parts else None,
        path=path,
        reason=reason,
        compiled=how.compile,
        notes=tuple(filter(None, (_left_out(timed.subject), alone.note, dense.note, _untested(timed.stamp)))),
        seed=how.seed,
        stamp=timed.stamp,
    )


def _path(model: nn.Module, batch: int) -> tuple[str, str]:
    """The executor of every layer, and why; layers that agree are counted together."""
    choices = [m.choice(m.grid, batch) for m in model.modules() if isinstance(m, Attention)]
    if not choices:
        return "timm", "timm's own attention"
    paths = Counter(choice.executor for choice in choices)
    text = next(iter(paths)) if len(paths) == 1 else " + ".join(f"{n}x{path}" for path, n in paths.items())
    return text, "; ".join(dict.fromkeys(choice.reason for choice in choices))


def _left_out(subject: Subject) -> str:
    """Say so if some layers were not given what was asked for."""
    stands = attention_of(subject.model)
    return "" if stands == subject.attention else f"{subject.attention} was asked for; what stands there is {stands}"


def _untested(marks: Mapping[str, Any]) -> str:
    return "" if marks["device"] == "cpu" else "timing on accelerators runs the same code but was never tested on one"


def _label(place: str, subject: Subject) -> str:
    return "the dense model" if place == _DENSE else subject.attention


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _evaluating(models: Any) -> Iterator[None]:
    modes = [(model, model.training) for model in models]
    try:
        for model, _ in modes:
            model.eval()
        yield
    finally:
        for model, training in modes:
            model.train(training)
