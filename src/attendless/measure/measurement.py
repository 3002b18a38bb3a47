"""A measurement: one model, at one size, compared with its baseline on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..attention import Macs, cap
from ..stamp import stamp_line
from .clock import Comparison


@dataclasses.dataclass(frozen=True)
class Setup:
    """What was measured, and how.

    `attention` is what the model attends with. If `asked` differs from it, `left_full` layers kept their attention
    because sparser attention is not faster there; `left` gives the reason as text. `tokens` is the number of tokens
    that enter the first layer, `tokens_spec` the token reducer. `path` names the backend of every layer and
    `reason` why it was chosen.
    """

    model: str
    attention: str
    size: tuple[int, int]
    batch: int
    params: int
    macs: Macs
    path: str
    reason: str
    tokens: int | None = None
    tokens_spec: str | None = None
    asked: str | None = None
    left_full: int = 0
    left: str = ""
    runtime: str = "eager"
    precision: str = "fp32"
    compiled: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Performance:
    """Performance of one model: ms per call, images/s at its best batch, memory in MB (10⁶ bytes).

    `peak_memory_mb` is what the model adds to a running PyTorch process, `process_memory_mb` the whole process.
    `parts_ms` splits an instrumented forward pass. `whole_ms` is a forward pass without instruments, interleaved with
    the instrumented ones. Unless the model is compiled, both are scaled so that `whole_ms` equals `latency_ms`.
    """

    latency_ms: float
    throughput: float | None = None
    best_batch: int | None = None
    peak_memory_mb: float | None = None
    process_memory_mb: float | None = None
    parts_ms: Mapping[str, float] | None = None
    whole_ms: float | None = None


@dataclasses.dataclass(frozen=True)
class SpeedLimit:
    """Amdahl's law for the baseline: the share of its attention core, by MACs and by time, and the maximum
    speed-up by another attention. None means not measured (`time_share`) or unbounded (a maximum)."""

    attention_share: float
    time_share: float | None = None

    @property
    def cap(self) -> float | None:
        return cap(self.attention_share)

    @property
    def time_cap(self) -> float | None:
        return None if self.time_share is None else cap(self.time_share)

    def __str__(self) -> str:
        by_time = "" if self.time_share is None else f", {_times(self.time_cap)} by time ({self.time_share:.1%})"
        return limit_by_macs(self.cap, self.attention_share) + by_time


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row: the setup, the model's performance, the baseline's, and the paired comparison of both.

    setup: what was measured.
    performance: latency, throughput and memory of the model.
    baseline: the same of the baseline.
    compared: the paired latency ratios baseline / model.
    limit: the maximum speed-up by Amdahl's law.
    stamp: machine, versions and settings.
    notes: remarks on the measurement.
    eager: the comparison with timm's model in eager PyTorch, where several runtimes were timed together.
    eager_latency_ms: the latency of that model.
    """

    setup: Setup
    performance: Performance
    baseline: Performance
    compared: Comparison
    limit: SpeedLimit
    stamp: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    eager: Comparison | None = None
    eager_latency_ms: float | None = None

    @property
    def label(self) -> str:
        """What was measured, and what was asked for if that differs."""
        setup = self.setup
        what = made_of(setup.attention, setup.tokens_spec)
        return f"{what} (asked {setup.asked}; {setup.left})" if setup.left else what

    @property
    def latency_ms(self) -> float:
        return self.performance.latency_ms

    @property
    def speedup(self) -> float:
        """Median of the paired latency ratios baseline / model."""
        return self.compared.ratio

    @property
    def verdict(self) -> str:
        """The comparison in words."""
        return verdict(self.compared)

    def as_dict(self) -> dict[str, Any]:
        """The row as flat JSON, without the stamp. Keys that begin with `dense_` are the baseline's."""
        setup = {field.name: getattr(self.setup, field.name) for field in dataclasses.fields(self.setup)}
        baseline = {f"dense_{key}": value for key, value in _flat(self.baseline).items() if key != "process_memory_mb"}
        limit = self.limit
        return {
            **setup,
            "size": list(self.setup.size),
            "macs": self.setup.macs.as_dict(),
            **_flat(self.performance),
            **baseline,
            "speedup": self.speedup,
            "spread": self.compared.spread,
            "quartiles": list(self.compared.quartiles),
            "pairs": self.compared.pairs,
            "distinguishable": self.compared.distinguishable,
            "verdict": self.verdict,
            "attention_share": limit.attention_share,
            "cap": limit.cap,
            "time_share": limit.time_share,
            "time_cap": limit.time_cap,
            "notes": list(self.notes),
            "eager_latency_ms": self.eager_latency_ms,
            "eager_speedup": self.eager.ratio if self.eager else None,
            "eager_spread": self.eager.spread if self.eager else None,
        }

    def limit_text(self) -> str:
        """The maximum speed-up, to be read before the measured one."""
        beyond = ", for sparser attention alone: token reduction can exceed it" if self.setup.tokens_spec else ""
        return f"{self.limit}{beyond}"

    def __str__(self) -> str:
        setup, (height, width) = self.setup, self.setup.size
        title = [setup.model, self.label, f"{height}x{width}", f"batch {setup.batch}"]
        title += ["compiled"] if setup.compiled else []
        macs = {name: f"{value / 1e6:,.1f}" for name, value in setup.macs.as_dict().items()}
        lines = {
            "max speed-up": self.limit_text(),
            "verdict": self.verdict,
            "latency": f"{self.latency_ms:.2f} ms, baseline {self.baseline.latency_ms:.2f} ms "
            f"({self.compared.pairs} pairs)",
            "throughput": _throughput(self.performance, self.baseline),
            "memory": _memory(self.performance, self.baseline),
            "MACs": f"{macs.pop('total')} M: " + ", ".join(f"{name} {value}" for name, value in macs.items()),
            "backend": f"{setup.path}: {setup.reason}",
            "time": _parts(self.performance.parts_ms),
            "baseline": _parts(self.baseline.parts_ms),
            "machine": stamp_line(self.stamp),
            "note": ("\n" + 16 * " ").join(self.notes),
        }
        body = [f"  {name:<14}{text}" for name, text in lines.items() if text]
        return "\n".join([" · ".join(filter(None, title)), *body])


def precision_of(model: nn.Module) -> str:
    """The precision of a model's weights: fp32, bf16 or fp16."""
    dtype = next((value.dtype for value in model.parameters()), torch.float32)
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(dtype, "fp32")


def verdict(compared: Comparison, other: str = "") -> str:
    """A comparison in words; a difference is claimed only if it is statistically significant. `other` names what was
    compared with (default: the baseline)."""
    ratio, (low, high) = compared.ratio, compared.quartiles
    quartiles, than = f"IQR {low:.2f}–{high:.2f}", f" than {other}" if other else ""
    if not compared.enough:
        against = f" against {other}" if other else ""
        return f"too few rounds for a verdict{against} within the budget: {compared.pairs} (median {ratio:.2f}×)"
    if not compared.distinguishable:
        return f"not distinguishable from {other or 'the baseline'} ({ratio:.2f}×, {quartiles})"
    if ratio > 1:
        return f"{ratio:.2f}× faster{than} ({quartiles})"
    return f"{1 / ratio:.2f}× slower{than} (speed-up {ratio:.2f}, {quartiles})"


def made_of(attention: str, tokens: str | None) -> str:
    """A short label of a model: its attention and, if there is one, its token reducer."""
    return f"{attention} · {tokens}" if tokens else attention


def limit_by_macs(limit: float | None, share: float) -> str:
    return f"{_times(limit)} by MACs (the attention core is {share:.1%} of the baseline's)"


def _flat(performance: Performance) -> dict[str, Any]:
    return {field.name: getattr(performance, field.name) for field in dataclasses.fields(performance)}


def _times(limit: float | None) -> str:
    return "unbounded" if limit is None else f"{limit:.2f}×"


def _throughput(model: Performance, baseline: Performance) -> str:
    if model.throughput is None:
        return ""
    other = f", baseline {baseline.throughput:.1f} at {baseline.best_batch}" if baseline.throughput else ""
    return f"{model.throughput:.1f} images/s at batch {model.best_batch}{other}"


def _memory(model: Performance, baseline: Performance) -> str:
    if model.peak_memory_mb is None:
        return ""
    other = f", baseline {baseline.peak_memory_mb:.1f} MB" if baseline.peak_memory_mb is not None else ""
    return f"{model.peak_memory_mb:.1f} MB at the peak{other}"


def _parts(parts: Mapping[str, float] | None) -> str:
    return "" if parts is None else ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items() if ms) + " ms"
