"""Amdahl's cap: what the whole model could gain if its attention core cost nothing at all.

Speeding up a part that takes the share s of the whole cannot gain more than 1 / (1 - s). Of a Transformer block with N
tokens of width C the core's share of the multiply-accumulates is N / (N + 6C); its share of the *time* is usually
larger, because softmax moves memory that MACs do not count. Both are taken from the dense model: they bound every
attention that could stand in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The parts of the layer view that an attention is free to change.
CORE = ("core", "selection")


def time_share(parts: Mapping[str, float]) -> float:
    return sum(parts[name] for name in CORE) / sum(parts.values())
