"""Amdahl's law: the maximum speed-up of a model whose attention core costs nothing.

Speeding up a part that takes the share s of the whole gains at most 1 / (1 - s). In a Transformer block with N tokens
of width C the core's share of the multiply-accumulates is N / (N + 6C). Its share of the *time* is usually larger,
because softmax moves memory that MACs do not count. Both shares are the baseline's, so they bound every attention that
replaces the baseline's.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The parts of the layer view that another attention can change.
CORE = ("core", "selection")


def time_share(parts: Mapping[str, float]) -> float:
    """The core's share of the time of all parts."""
    return sum(parts[name] for name in CORE) / sum(parts.values())
