"""A clock for tests of `optimize`: the time of a variant follows from its name, whatever the machine does.

Searches that use it choose the same variant in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attendless.measure.clock import Timings
from attendless.optimize import schedules, session

#: Text in a variant's name → the share of the time that is left with it.
SHARES = {"onnx": 0.8, "openvino": 0.7, "int8": 0.5, "rank": 0.6, "more layers dynamic": 1.2, "class-token-only": 0.97}
#: What `token_times` measures.
BY_TOKENS = {"patches": [16, 32, 64], "ms": [1.0, 2.0, 4.0], "reducing": [16, 64], "added": [0.01, 0.04]}
#: The names that were timed, for tests that count them.
TIMED: list[str] = []


def seconds(name: str) -> float:
    found = 0.01
    for text, share in SHARES.items():
        found *= share if text in name else 1.0
    return found


def benchmark(calls: Mapping[str, Any], *given: object) -> Timings:
    """In place of `measuring.benchmark`. Every call is made once."""
    for name, call in calls.items():
        call()
        TIMED.append(name)
    return Timings({name: [seconds(name)] * 12 for name in calls})


def install(patch: Any) -> None:
    """`patch(object, name, value)`: `monkeypatch.setattr` or `setattr`."""
    patch(session, "benchmark", benchmark)
    patch(schedules, "token_times", lambda *given: {"full": BY_TOKENS})
