"""`bench`: what a model that attends less gains against the dense model, measured here and now.

What is measured is what stands there. A saved file is measured as it is, or as asked; only a model given by its name is
converted as `convert` does it, so that layers may stay full, and then the row says so.

The order matters. The cap comes first, by formula, wherever there is one; then memory, in processes of their own; then
the contestants race; then each is looked at alone, for its best batch and its parts. Multiply-accumulates for which
there is no formula come last, because counting them by running can make compiled models slow ever after
(pytorch#140909).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..attention import Attention, Macs, cap
from ..backbones import is_backbone
from ..integrations.slot import exchangeable
from ..sizes import input_size, model_name, parse_size
from .cap import time_share
from .macs import count
from .measurement import Measurement
from .runtime import find_runtimes
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
from .timing import Conditions, Timed, announced, time_all

Size = int | tuple[int, int] | str
_DEFAULT = Conditions()


def bench(
    model: nn.Module,
    like: nn.Module | None = None,
    *,
    size: Size | None = None,
    name: str | None = None,
    runtimes: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Measure `model` against the dense model `like`; without one, against the timm model it came from.

    `settings` are those of `Conditions`: `batch`, `threads`, `compile`, `budget`, `seed`, and `memory`, `throughput` or
    `parts` to leave one out. Print the result, a `Measurement`, for a summary; `as_dict()` is its JSON.

    With `runtimes`, such as `["eager", "compile", "onnx", "openvino"]`, both models race in each of them, and the
    result is a list of measurements of latency, the dense models' among them; print it for a table.
    """
    if not runtimes:
        return bench_all([model], like, size=size, name=name, **settings)[0]
    how = Conditions(**settings)
    (sized,), dense, pixels = _sized([model], like, size)
    with _threads(how.threads):
        macs = announced(dense, pixels, how)
        timed, failures = time_across([described(sized)], described(dense), pixels, how, macs, runtimes)
        return Table([_row(result, name or model_name(model), how) for result in timed], failures)


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
    sized, dense, pixels = _sized(models, like, size)
    with _threads(how.threads):
        macs = announced(dense, pixels, how)
        timed = time_all([described(model) for model in sized], described(dense), pixels, how, macs)
        return [_row(result, name or model_name(models[0]), how) for result in timed]


def _sized(
    models: Sequence[nn.Module], like: nn.Module | None, size: Size | None
) -> tuple[list[nn.Module], nn.Module, tuple[int, int]]:
    """The models and their dense one, all of one size, and that size."""
    dense = like if like is not None else original(models[0])
    pixels = parse_size(size) if size is not None else input_size(models[0])
    *sized, dense = (m if input_size(m) == pixels else resized(m, pixels) for m in (*models, dense))
    return sized, dense, pixels


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

    The contestants of one size race together, against one dense model, and their rows come as soon as they are known.
    Attentions of which the same remains, since their layers were left full, are one contestant. Without attentions a
    model is measured as it is, and timm's `VisionTransformer` with `full` in our backbone.

    With `runtimes` there is a row for each of them and each contestant, the dense model among them; who cannot run
    where is told in `failures`.
    """
    find_runtimes(runtimes)
    if Path(model).is_file():
        opening |= {"below_breakeven": "keep"}
    waiting: list[Timed] = []
    with _threads(how.threads):
        for size in sizes or (None,):
            given = named(model, size=size, **opening)
            dense = described(original(given.model)) if converted(given.model) else given
            macs = announced(dense.model, input_size(dense.model), how)
            asked = attentions or ((None,) if exchangeable(given.model) else ("full",))
            subjects = [
                given if text is None and left is None else named(model, text, left, size=size, **opening)
                for text in asked
                for left in tokens or (None,)
            ]
            if runtimes:
                different = [*{subject.label: subject for subject in subjects}.values()]
                timed, told = time_across(different, dense, input_size(dense.model), how, macs, runtimes)
                failures = [] if failures is None else failures
                failures += told
            else:
                timed = _time_once(subjects, dense, how, macs)
            if how.compile and macs is None:  # counted by running, which must come after all timing
                waiting += timed
            else:
                yield from (_row(result, str(model), how) for result in timed)
        yield from (_row(result, str(model), how) for result in waiting)


def _time_once(subjects: Sequence[Subject], dense: Subject, how: Conditions, macs: Macs | None) -> list[Timed]:
    """Time the subjects; those that came out as the same model are timed as one, and it is said."""
    first: dict[str, Subject] = {}
    for subject in subjects:
        first.setdefault(subject.label, subject)
    timed = time_all([*first.values()], dense, input_size(dense.model), how, macs)
    found = {result.subject.label: result for result in timed}
    results = []
    for subject in subjects:
        one = first[subject.label]
        same = () if one is subject else (f"{subject.asked} came out as the same model as {one.asked}: timed once",)
        named_so = dataclasses.replace(subject, notes=(*subject.notes, *same))
        results.append(dataclasses.replace(found[subject.label], subject=named_so))
    return results


# Counting and writing down -------------------------------------------------------------------------------------------


def _row(timed: Timed, name: str, how: Conditions) -> Measurement:
    model: Any = timed.subject.model
    left = timed.subject.left()
    compared = timed.race.compare(timed.place, timed.against)
    first = timed.race.compare(timed.place, EAGER) if EAGER in timed.race.seconds else None
    dense_macs = timed.dense_macs or count(timed.dense, timed.size)
    path, reason = _path(model, how.batch)
    alone, dense = timed.alone, timed.dense_alone
    of_time = time_share(dense.parts.ms) if dense.parts else None
    return Measurement(
        model=name,
        attention=timed.subject.attention,
        tokens_spec=tokens_of(model) or None,
        asked=timed.subject.asked,
        left_full=left.count,
        left=left.words,
        size=timed.size,
        tokens=model.grid(timed.size).tokens if hasattr(model, "grid") else None,
        batch=how.batch,
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=count(model, timed.size),
        latency_ms=1e3 * timed.race.median(timed.place),
        dense_latency_ms=1e3 * timed.race.median(timed.against),
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
        notes=tuple(filter(None, (*timed.subject.notes, alone.note, dense.note, _untested(timed.stamp)))),
        seed=how.seed,
        stamp=timed.stamp,
        runtime="compile" if how.compile else timed.runtime,
        eager_latency_ms=1e3 * timed.race.median(EAGER) if first else None,
        eager_speedup=first.ratio if first else None,
        eager_spread=first.spread if first else None,
    )


def _path(model: nn.Module, batch: int) -> tuple[str, str]:
    """The backend of every layer on the tokens it gets, and why; layers that agree are counted together, and the first
    of them says why."""
    if is_backbone(model):
        rows: Any = model.costs(batch=batch)  # type: ignore[operator]
        choices = [(row.spec.name, row.choice) for row in rows if row.spec is not None]
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
