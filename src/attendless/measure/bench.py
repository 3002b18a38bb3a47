"""`bench`: the speed-up of a model over its baseline, measured on this machine.

A saved file is measured as it is, or as asked. A model given by its name is converted as `convert` does it, so layers
may keep full attention; the row reports it.

The order matters. The maximum speed-up comes first, if there is a formula; then memory, in separate processes; then
the interleaved benchmark; then the best batch and the parts of each model. Multiply-accumulates without
a formula come last, because counting them by running can slow compiled models down for good (pytorch#140909).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from ..attention import Attention, Macs
from ..backbones import is_backbone
from ..backbones.class_token_tail import READOUT
from ..convert.source import comparable
from ..integrations.discovery import exchangeable
from ..sizes import input_size, model_name, parse_size
from .amdahl import time_share
from .clock import NOISY, Comparison
from .macs import count
from .measurement import Measurement, Performance, Setup, SpeedLimit, precision_of
from .runtime import find_runtimes, split_precision
from .runtime_table import EAGER, Table, time_across
from .subject import (
    Subject,
    converted,
    described,
    named,
    original,
    resized,
    tokens_of,
)
from .timing import Alone, Conditions, Timed, announced, time_all

Size = int | tuple[int, int] | str
_DEFAULT = Conditions()


@overload
def bench(
    model: nn.Module,
    like: nn.Module | None = None,
    *,
    size: Size | None = None,
    name: str | None = None,
    runtimes: Sequence[str],
    **settings: Any,
) -> Table: ...


@overload
def bench(
    model: nn.Module,
    like: nn.Module | None = None,
    *,
    size: Size | None = None,
    name: str | None = None,
    **settings: Any,
) -> Measurement: ...


def bench(
    model: nn.Module,
    like: nn.Module | None = None,
    *,
    size: Size | None = None,
    name: str | None = None,
    runtimes: Sequence[str] = (),
    **settings: Any,
) -> Measurement | Table:
    """Measure `model` against a baseline.

    Args:
        model: The model to measure.
        like: The baseline. Default: the timm model that `model` was converted from.
        size: Image size in pixels, S, (height, width) or "HxW". Default: the model's own.
        name: The model's name in the result. Default: its own.
        runtimes: Runtimes in which both models are timed, such as `["eager", "compile", "onnx", "openvino-bf16"]`; a
            name without a precision means fp32.
        **settings: The fields of `Conditions`: `batch`, `threads`, `compile`, `budget`, `seed`, and `memory`,
            `throughput` or `parts` (False leaves that measurement out).

    Returns:
        A `Measurement`; print it for a summary, `as_dict()` is its JSON. With `runtimes`, a `Table`: a list of
        latency measurements, one for each model and runtime, the baselines included.
    """
    if not runtimes:
        return bench_all([model], like, size=size, name=name, **settings)[0]
    how = Conditions(**settings)
    (sized,), baseline, pixels = _sized([model], like, size)
    with _threads(how.threads):
        macs = announced(baseline, pixels, how)
        timed, failures = time_across([described(sized)], described(baseline), pixels, how, macs, runtimes)
        return Table([_row(result, name or model_name(model), how) for result in timed], failures)


def bench_all(
    models: Sequence[nn.Module],
    like: nn.Module | None = None,
    *,
    size: Size | None = None,
    name: str | None = None,
    **settings: Any,
) -> list[Measurement]:
    """As `bench`, for several models whose timing is interleaved, so that all meet the same conditions."""
    how = Conditions(**settings)
    sized, baseline, pixels = _sized(models, like, size)
    with _threads(how.threads):
        macs = announced(baseline, pixels, how)
        timed = time_all([described(model) for model in sized], described(baseline), pixels, how, macs)
        return [_row(result, name or model_name(models[0]), how) for result in timed]


def _sized(
    models: Sequence[nn.Module], like: nn.Module | None, size: Size | None
) -> tuple[list[nn.Module], nn.Module, tuple[int, int]]:
    """The models and their baseline, all of one size, and that size."""
    baseline = like if like is not None else original(models[0])
    pixels = parse_size(size) if size is not None else input_size(models[0])
    *sized, baseline = (m if input_size(m) == pixels else resized(m, pixels) for m in (*models, baseline))
    return sized, baseline, pixels


def bench_rows(
    model: str,
    attentions: Sequence[str] = (),
    sizes: Sequence[Size] = (),
    how: Conditions = _DEFAULT,
    *,
    tokens: Sequence[str] = (),
    runtimes: Sequence[str] = (),
    failures: list[str] | None = None,
    **opening: Any,
) -> Iterator[Measurement]:
    """One row for every size, attention and token reducer of a model opened by name (or file); `opening` goes to
    `open_model`.

    The variants of one size are timed together, against one baseline, and their rows come as soon as they are known.
    All variants have a class-token-only last layer, or none has (`comparable`); the baseline has none.
    Attentions that end in the same model, because their layers kept full attention, are one variant. Without attentions
    the model is measured as it is, and timm's `VisionTransformer` with `full` in an attendless backbone.

    With `runtimes` there is a row for each runtime and variant, the baseline included; `failures` receives a line for
    each variant that cannot run in a runtime.
    """
    find_runtimes(runtimes)
    opening = comparable(opening, attentions, tokens)
    if Path(model).is_file():
        opening |= {"below_breakeven": "keep"}
    as_given = {name: value for name, value in opening.items() if name != READOUT}
    waiting: list[Timed] = []
    with _threads(how.threads):
        for size in sizes or (None,):
            given = named(model, size=size, **(as_given if attentions or tokens else opening))
            baseline = described(original(given.model)) if converted(given.model) else given
            macs = announced(baseline.model, input_size(baseline.model), how)
            asked = attentions or ((None,) if exchangeable(given.model) else ("full",))
            subjects = [
                given if text is None and left is None else named(model, text, left, size=size, **opening)
                for text in asked
                for left in tokens or (None,)
            ]
            if runtimes:
                different = [*{subject.label: subject for subject in subjects}.values()]
                timed, told = time_across(different, baseline, input_size(baseline.model), how, macs, runtimes)
                failures = [] if failures is None else failures
                failures += told
            else:
                timed = _time_once(subjects, baseline, how, macs)
            if how.compile and macs is None:  # counted by running, which must come after all timing
                waiting += timed
            else:
                yield from (_row(result, str(model), how) for result in timed)
        yield from (_row(result, str(model), how) for result in waiting)


def _time_once(subjects: Sequence[Subject], baseline: Subject, how: Conditions, macs: Macs | None) -> list[Timed]:
    """Time the subjects; those that came out as the same model are timed once, with a note."""
    first: dict[str, Subject] = {}
    for subject in subjects:
        first.setdefault(subject.label, subject)
    timed = time_all([*first.values()], baseline, input_size(baseline.model), how, macs)
    found = {result.subject.label: result for result in timed}
    results = []
    for subject in subjects:
        one = first[subject.label]
        same = () if one is subject else (f"{subject.asked} gave the same model as {one.asked}: timed once",)
        named_so = dataclasses.replace(subject, notes=(*subject.notes, *same))
        results.append(dataclasses.replace(found[subject.label], subject=named_so))
    return results


# Results ----------------------------------------------------------------------------------------------------------


def _row(timed: Timed, name: str, how: Conditions) -> Measurement:
    model: Any = timed.subject.model
    left = timed.subject.left()
    path, reason = _path(model, how.batch)
    setup = Setup(
        model=name,
        attention=timed.subject.attention,
        size=timed.size,
        batch=how.batch,
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=count(model, timed.size),
        path=path,
        reason=reason,
        tokens=model.grid(timed.size).tokens if hasattr(model, "grid") else None,
        tokens_spec=tokens_of(model) or None,
        asked=timed.subject.asked,
        left_full=left.count,
        left=left.words,
        runtime="compile" if how.compile else split_precision(timed.runtime)[0],
        precision=precision_of(model) if timed.runtime == "eager" else split_precision(timed.runtime)[1],
        compiled=how.compile,
        seed=how.seed,
    )
    baseline_macs, parts = timed.baseline_macs or count(timed.baseline, timed.size), timed.baseline_alone.parts
    with_eager = EAGER in timed.timings.seconds
    compared = timed.timings.compare(timed.place, timed.against)
    return Measurement(
        setup,
        performance=_performance(timed.timings.median(timed.place), timed.alone),
        baseline=_performance(timed.timings.median(timed.against), timed.baseline_alone),
        compared=compared,
        limit=SpeedLimit(baseline_macs.share, time_share(parts.ms) if parts else None),
        stamp=timed.stamp,
        notes=tuple(
            filter(
                None,
                (
                    *timed.subject.notes,
                    timed.alone.note,
                    timed.baseline_alone.note,
                    _untested(timed.stamp),
                    _noisy(timed, compared),
                ),
            )
        ),
        eager=timed.timings.compare(timed.place, EAGER) if with_eager else None,
        eager_latency_ms=1e3 * timed.timings.median(EAGER) if with_eager else None,
    )


def _performance(seconds: float, alone: Alone) -> Performance:
    (batch, rate), memory, parts = alone.rate, alone.memory, alone.parts
    return Performance(
        latency_ms=1e3 * seconds,
        throughput=rate,
        best_batch=batch,
        peak_memory_mb=memory.peak if memory else None,
        process_memory_mb=memory.process if memory else None,
        parts_ms=parts.ms if parts else None,
        whole_ms=parts.whole_ms if parts else None,
    )


def _path(model: nn.Module, batch: int) -> tuple[str, str]:
    """The backend of every layer on the tokens it receives, and the reason; equal layers are counted together."""
    if is_backbone(model):
        rows = model.costs(batch=batch)
        choices = [(row.spec.name, row.choice) for row in rows if row.spec is not None and row.choice is not None]
    else:
        choices = [(m.name, m.choice(m.grid, batch)) for m in model.modules() if isinstance(m, Attention)]
    if not choices:
        return "timm", "timm's own attention"
    paths = Counter(choice.backend for _, choice in choices)
    text = next(iter(paths)) if len(paths) == 1 else " + ".join(f"{n}x{path}" for path, n in paths.items())
    reasons: dict[tuple[str, str], str] = {}
    for name, choice in choices:
        reasons.setdefault((name, choice.backend), choice.reason)
    return text, "; ".join(dict.fromkeys(reasons.values()))


def _noisy(timed: Timed, compared: Comparison) -> str:
    """A warning if the machine was disturbed: paired ratios that scatter, or a forward pass that takes longer in one
    part of the run than in another. Both remain stable on an idle machine."""
    scatter = compared.spread / compared.ratio
    measured = [parts for parts in (timed.alone.parts, timed.baseline_alone.parts) if parts is not None]
    drift = max((max(p.as_measured_ms / p.whole_ms, p.whole_ms / p.as_measured_ms) for p in measured), default=1.0)
    if not compared.enough or (scatter <= NOISY and drift <= DRIFT):
        return ""
    what = f"the paired ratios scatter by {scatter:.0%}" if scatter > NOISY else f"latencies drifted by {drift:.2f}×"
    return f"noisy run: {what} while other programs ran or the clock changed; trust the ratios, not single times"


#: The largest ratio of two latencies of one model in one run on an undisturbed machine.
DRIFT = 1.25


def _untested(marks: Mapping[str, Any]) -> str:
    return "" if marks["device"] == "cpu" else "timing on accelerators runs the same code but was never tested on one"


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
