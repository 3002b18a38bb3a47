"""Figures of one run that agree with each other, and warnings where the machine was disturbed."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import timm

from attendless.errors import UserError
from attendless.measure import bench as bench_module
from attendless.measure import timing
from attendless.measure.bench import bench
from attendless.measure.clock import Timings, compare
from attendless.measure.measurement import verdict
from attendless.measure.memory import peak_memory
from attendless.measure.parts import Parts


@pytest.mark.parametrize("peak", [-9.8, 1.0])
def test_a_peak_below_the_weights_is_not_reported(monkeypatch: pytest.MonkeyPatch, peak: float) -> None:
    told = json.dumps({"peak": peak, "weights": 1.8, "process": 300.0})
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0, stdout=told, stderr=""))
    with pytest.raises(UserError, match=r"could not be measured: .* is less than the weights"):
        peak_memory("torch.nn:Linear", {}, size=(32, 32))


def test_one_wording_of_a_comparison() -> None:
    few, same, fast = compare([1] * 5, [1.3] * 5), compare([1] * 30, [1] * 30), compare([1] * 30, [2] * 30)
    assert verdict(few) == "too few rounds for a verdict within the budget: 5 (median 1.30×)"
    assert verdict(few, "eager") == "too few rounds for a verdict against eager within the budget: 5 (median 1.30×)"
    assert verdict(same, "eager") == "not distinguishable from eager (1.00×, IQR 1.00–1.00)"
    assert verdict(fast) == "2.00× faster (IQR 2.00–2.00)"
    assert verdict(fast, "eager") == "2.00× faster than eager (IQR 2.00–2.00)"


def test_an_export_uses_that_wording() -> None:
    from attendless.export.speed import Speed

    few = compare([1] * 5, [1.3] * 5)
    assert "too few rounds" in str(Speed(1, 1, 1.0, 1.3, few, 1.3, few, {}))


def test_both_tables_have_one_latency() -> None:
    model = timm.create_model("columnar_micro_patch4_32").eval()
    row = bench(model, like=model, budget=0.05, memory=False, throughput=False)
    assert row.performance.whole_ms == pytest.approx(row.latency_ms)
    assert row.baseline.whole_ms == pytest.approx(row.baseline.latency_ms)


def test_throughputs_come_from_one_interleaved_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[set[str]] = []
    real = timing.interleave

    def watched(calls: Any, **how: Any) -> Timings:
        timed.append(set(calls))
        return real(calls, **how)

    monkeypatch.setattr(timing, "interleave", watched)
    monkeypatch.setattr(timing, "best_batch", lambda *a, **k: (2, 1e9))
    model = timm.create_model("columnar_micro_patch4_32").eval()
    row = bench(model, like=model, budget=0.05, memory=False, parts=False)
    assert timed == [{"baseline", "0"}] * 2
    assert row.performance.best_batch == 2
    assert row.performance.throughput is not None
    assert row.performance.throughput < 1e9


@pytest.mark.parametrize(
    ("ratios", "measured", "says"),
    [
        ([2.0] * 30, 100.0, ""),
        ([1.5, 2.0, 2.5] * 10, 100.0, "noisy run: the paired ratios scatter by"),
        ([2.0] * 30, 163.0, "noisy run: latencies drifted by 1.63×"),
    ],
)
def test_a_noisy_run_is_flagged(ratios: list[float], measured: float, says: str) -> None:
    alone = SimpleNamespace(parts=Parts({}, 100.0, measured))
    timed: Any = SimpleNamespace(alone=alone, baseline_alone=SimpleNamespace(parts=None))
    found = bench_module._noisy(timed, compare([1.0] * 30, ratios))
    assert found.startswith(says)
    assert bool(found) == bool(says)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_report_of_a_conversion_fits_the_terminal(width: int) -> None:
    from attendless.convert import convert_with_report

    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    report = convert_with_report(model, "foveal:keep=0.1", size=64, below_breakeven="keep")[1]
    assert max(map(len, report.text(width).splitlines())) <= width
    assert "foveal:keep=0.1" in str(report)
