"""One table, runtime × attention: every model in every runtime, interleaved in one process.

The baseline is timed in each runtime, so a row has two speed-ups: `speedup` over the baseline in the same runtime, and
`eager` over timm's model in eager PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..attention import Macs
from ..errors import UserError
from ..sizes import size_text
from ..stamp import stamp
from .clock import Call, device_timer, interleave
from .measurement import Measurement
from .memory_check import told_if_full
from .runtime import Runtime, find_runtimes
from .subject import Subject, images_for
from .timing import (
    BASELINE,
    Alone,
    Conditions,
    Timed,
    check_answer,
    evaluating,
)

#: timm's own model in eager PyTorch, the common reference of all rows.
EAGER = "eager:baseline"


class Table(list[Measurement]):
    """Rows, and in `failures` one line for each model that could not run in a runtime."""

    def __init__(self, rows: Sequence[Measurement] = (), failures: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.failures = list(failures)

    def __str__(self) -> str:
        lines = [f"{'runtime':<14}{'attention':<40}{'size':>9}{'ms':>10}{'× same runtime':>16}{'× timm eager':>16}"]
        for row in self:
            both = f"{row.speedup:>15.2f}×{row.eager.ratio if row.eager else 0:>15.2f}×"
            label = "baseline (timm)" if row.setup.path == "timm" else row.label
            size = size_text(row.setup.size)
            lines.append(f"{row.setup.runtime:<14}{label:<40}{size:>9}{row.latency_ms:>10.2f}{both}")
        return "\n".join([*lines, *self.failures])


def time_across(
    subjects: Sequence[Subject],
    baseline: Subject,
    size: tuple[int, int],
    how: Conditions,
    macs: Macs | None,
    names: Sequence[str],
) -> tuple[list[Timed], list[str]]:
    """Time the baseline and the subjects in every runtime, and list the models that cannot run in one."""
    runtimes = find_runtimes(["eager", *names])
    asked = set(names)
    models = {BASELINE: baseline} | {str(i): subject for i, subject in enumerate(subjects)}
    where, failures = f"at {size_text(size)} px", list[str]()
    calls: dict[str, Call] = {}
    with evaluating([subject.model for subject in models.values()]), told_if_full(size, how.batch):
        images = images_for(baseline.model, size, how.batch)
        for runtime in runtimes:
            for place, subject in models.items():
                if runtime.name not in asked and place != BASELINE:
                    continue
                label = "the baseline" if place == BASELINE else subject.label
                how.progress(f"preparing {label} for {runtime.name} {where}")
                with _left_out(f"{label} in {runtime.name} {where}", failures):
                    calls[f"{runtime.name}:{place}"] = _prepared(runtime, subject.model, images, label)
        how.progress(f"timing {len(calls)} variants {where}")
        device = next(baseline.model.parameters()).device
        budget = how.budget * max(1, len(calls) - 1)
        timings = interleave(calls, timer=device_timer(device), budget=budget, seed=how.seed)
    marks = stamp(device)
    found = []
    for place in calls:
        runtime_name, _, number = place.partition(":")
        against = f"{runtime_name}:{BASELINE}"
        if runtime_name in asked and against in calls:
            timed = Timed(
                subject=models[number],
                baseline=baseline.model,
                baseline_macs=macs,
                size=size,
                timings=timings,
                place=place,
                alone=Alone(),
                baseline_alone=Alone(),
                stamp=marks,
                against=against,
                runtime=runtime_name,
            )
            found.append(timed)
    return found, failures


def _prepared(runtime: Runtime, model: nn.Module, images: Tensor, label: str) -> Call:
    with torch.inference_mode():
        call = runtime.prepare(model, images)
        check_answer(call(), f"{label} in {runtime.name}")
    return call


@contextlib.contextmanager
def _left_out(what: str, failures: list[str]) -> Iterator[None]:
    try:
        yield
    except (UserError, RuntimeError) as error:
        if what.startswith("the baseline in eager"):
            raise
        failures.append(f"{what} cannot run: {str(error).splitlines()[0][:200]}")
