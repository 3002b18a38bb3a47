"""One table, runtime × attention: every model in every runtime, by turns, in one process.

The dense model stands in each runtime too. So a row tells two things: what attending less gains where the model runs
anyway (`speedup`, against the dense model of the same runtime), and what runtime and attention gain together
(`eager_speedup`, against timm's model in eager PyTorch).
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
from .clock import Call, device_timer, race
from .measurement import Measurement
from .memory_check import told_if_full
from .runtime import Runtime, find_runtimes
from .subject import Subject, images_for
from .timing import (
    DENSE,
    Alone,
    Conditions,
    Timed,
    check_answer,
    evaluating,
)

#: timm's own model in eager PyTorch: what every gain is told against.
EAGER = "eager:dense"


class Table(list[Measurement]):
    """Rows, and in `failures` who could not run where."""

    def __init__(self, rows: Sequence[Measurement] = (), failures: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.failures = list(failures)

    def __str__(self) -> str:
        lines = [f"{'runtime':<10}{'attention':<40}{'size':>9}{'ms':>10}{'vs dense there':>16}{'vs eager dense':>16}"]
        for row in self:
            both = f"{row.speedup:>15.2f}×{row.eager_speedup or 0:>15.2f}×"
            label = "dense (timm)" if row.path == "timm" else row.label
            lines.append(f"{row.runtime:<10}{label:<40}{size_text(row.size):>9}{row.latency_ms:>10.2f}{both}")
        return "\n".join([*lines, *self.failures])


def time_across(
    subjects: Sequence[Subject],
    dense: Subject,
    size: tuple[int, int],
    how: Conditions,
    macs: Macs | None,
    names: Sequence[str],
) -> tuple[list[Timed], list[str]]:
    """Time the dense model and the subjects in every runtime; who cannot run somewhere is left out there, and told."""
    runtimes = find_runtimes(["eager", *names])
    asked = set(names)
    models = {DENSE: dense} | {str(i): subject for i, subject in enumerate(subjects)}
    where, failures = f"at {size_text(size)} px", list[str]()
    calls: dict[str, Call] = {}
    with evaluating([subject.model for subject in models.values()]), told_if_full(size, how.batch):
        images = images_for(dense.model, size, how.batch)
        for runtime in runtimes:
            for place, subject in models.items():
                if runtime.name not in asked and place != DENSE:
                    continue
                label = "the dense model" if place == DENSE else subject.label
                how.progress(f"preparing {label} for {runtime.name} {where}")
                with _left_out(f"{label} in {runtime.name} {where}", failures):
                    calls[f"{runtime.name}:{place}"] = _prepared(runtime, subject.model, images, label)
        how.progress(f"timing {len(calls)} contestants {where}")
        device = next(dense.model.parameters()).device
        budget = how.budget * max(1, len(calls) - 1)
        raced = race(calls, timer=device_timer(device), budget=budget, seed=how.seed)
    marks = stamp(device)
    found = []
    for place in calls:
        runtime_name, _, number = place.partition(":")
        against = f"{runtime_name}:{DENSE}"
        if runtime_name in asked and against in calls:
            alone = Alone(), Alone()
            timed = Timed(models[number], dense.model, macs, size, raced, place, *alone, marks, against, runtime_name)
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
        if what.startswith("the dense model in eager"):
            raise
        failures.append(f"{what} cannot run: {str(error).splitlines()[0][:200]}")
