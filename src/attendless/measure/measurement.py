"""A measurement: one model, at one size, against the dense model it came from, on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..attention import Macs
from ..stamp import stamp_line
from .clock import enough


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row. Times are milliseconds a call, memory MB (10⁶ bytes), throughput images a second.

    `attention` is what was measured. Where `asked` is something else, `left_full` layers stayed as they were, because
    attending less does not pay there; `left` says so in words.

    `peak_memory_mb` is what the model adds to a running PyTorch, `process_memory_mb` the whole of that process.

    `speedup` is the median of the paired ratios dense / this, `spread` their interquartile range. The shares and caps
    are the dense model's: what its attention core takes, and the most that any attention in its place could gain.
    """

    model: str
    attention: str
    size: tuple[int, int]
    batch: int
    params: int
    macs: Macs
    latency_ms: float
    dense_latency_ms: float
    speedup: float
    spread: float
    quartiles: tuple[float, float]
    pairs: int
    distinguishable: bool
    attention_share: float
    cap: float | None
    path: str
    reason: str
    compiled: bool
    seed: int
    stamp: Mapping[str, Any]
    asked: str | None = None
    left_full: int = 0
    left: str = ""
    tokens: int | None = None
    tokens_spec: str | None = None
    throughput: float | None = None
    best_batch: int | None = None
    dense_throughput: float | None = None
    dense_best_batch: int | None = None
    peak_memory_mb: float | None = None
    dense_peak_memory_mb: float | None = None
    process_memory_mb: float | None = None
    time_share: float | None = None
    time_cap: float | None = None
    parts_ms: Mapping[str, float] | None = None
    dense_parts_ms: Mapping[str, float] | None = None
    #: A forward without instruments, timed in turn with those whose parts were.
    whole_ms: float | None = None
    dense_whole_ms: float | None = None
    notes: tuple[str, ...] = ()
    #: What ran both models; and, where several runtimes raced, how both compare with timm's model in eager PyTorch.
    runtime: str = "eager"
    eager_latency_ms: float | None = None
    eager_speedup: float | None = None
    eager_spread: float | None = None

    @property
    def label(self) -> str:
        """What was measured, and what was asked for if that is something else."""
        what = made_of(self.attention, self.tokens_spec)
        return f"{what} (asked {self.asked}; {self.left})" if self.left else what

    @property
    def verdict(self) -> str:
        low, high = self.quartiles
        quartiles = f"IQR {low:.2f}–{high:.2f}"
        if not enough(self.pairs):
            return f"too few rounds for a verdict within the budget: {self.pairs} (median {self.speedup:.2f}×)"
        if not self.distinguishable:
            return f"not distinguishable from the dense model ({self.speedup:.2f}×, {quartiles})"
        if self.speedup > 1:
            return f"{self.speedup:.2f}× faster ({quartiles})"
        return f"{1 / self.speedup:.2f}× slower (speed-up {self.speedup:.2f}, {quartiles})"

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON; the stamp stands once beside the rows."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "stamp"}
        return row | {
            "size": list(self.size),
            "macs": self.macs.as_dict(),
            "quartiles": list(self.quartiles),
            "verdict": self.verdict,
            "notes": list(self.notes),
        }

    def cap_text(self) -> str:
        """What can be gained at most, to be read before what was."""
        beyond = "for attending less alone: fewer tokens gain beyond it" if self.tokens_spec else ""
        return ", ".join(filter(None, (cap_by_macs(self.cap, self.attention_share), self.cap_by_time(), beyond)))

    def cap_by_time(self) -> str:
        """Empty if the parts were not timed."""
        return "" if self.time_share is None else f"{_times(self.time_cap)} by time ({self.time_share:.1%})"

    def __str__(self) -> str:
        height, width = self.size
        title = [self.model, self.label, f"{height}x{width}", f"batch {self.batch}"]
        title += ["compiled"] if self.compiled else []
        macs = {name: f"{value / 1e6:,.1f}" for name, value in self.macs.as_dict().items()}
        lines = {
            "cap": self.cap_text(),
            "verdict": self.verdict,
            "latency": f"{self.latency_ms:.2f} ms, dense {self.dense_latency_ms:.2f} ms ({self.pairs} pairs)",
            "throughput": _throughput(self),
            "memory": _memory(self),
            "MACs": f"{macs.pop('total')} M: " + ", ".join(f"{name} {value}" for name, value in macs.items()),
            "backend": f"{self.path}: {self.reason}",
            "time": _parts(self.parts_ms),
            "dense time": _parts(self.dense_parts_ms),
            "machine": stamp_line(self.stamp),
            "note": "\n              ".join(self.notes),
        }
        body = [f"  {name:<12}{text}" for name, text in lines.items() if text]
        return "\n".join([" · ".join(filter(None, title)), *body])


def made_of(attention: str, tokens: str | None) -> str:
    """A model in short: what it attends with, and what reduces its tokens."""
    return f"{attention} · {tokens}" if tokens else attention


def cap_by_macs(cap: float | None, share: float) -> str:
    return f"{_times(cap)} by MACs (the core is {share:.1%} of the dense model's)"


def _times(cap: float | None) -> str:
    return "unbounded" if cap is None else f"{cap:.2f}×"


def _throughput(row: Measurement) -> str:
    if row.throughput is None:
        return ""
    dense = f", dense {row.dense_throughput:.1f} at {row.dense_best_batch}" if row.dense_throughput else ""
    return f"{row.throughput:.1f} images/s at batch {row.best_batch}{dense}"


def _memory(row: Measurement) -> str:
    if row.peak_memory_mb is None:
        return ""
    dense = f", dense {row.dense_peak_memory_mb:.1f} MB" if row.dense_peak_memory_mb is not None else ""
    return f"{row.peak_memory_mb:.1f} MB at the peak{dense}"


def _parts(parts: Mapping[str, float] | None) -> str:
    return "" if parts is None else ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items() if ms) + " ms"
