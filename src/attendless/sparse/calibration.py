"""What each backend costs on this machine: seconds = overhead + multiply-accumulates · rate.

A few sizes of each operation take turns for a few seconds, the quickest of each counts, and a line is fitted through
them. That is done once for a machine, a number of threads, a version of PyTorch and a type of number, and kept as a
small JSON file in the user's cache folder (`$XDG_CACHE_HOME/attendless`). An backend that came later is measured when
it is first asked about. A file that is damaged is made again; a folder that cannot be written to costs no more than
measuring again in the next process. What was measured while other programs held the processors serves this process,
which says so, and is not kept.

The lines are for estimates: which of two is quicker, and about how long. `bench` measures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from .. import compiled
from ..plugins import source_of
from ..stamp import processor
from ..storage import atomic, cache_folder
from .backend import (
    Backend,
    Case,
    Probe,
    every_backend,
    samples,
)

_VERSION = 9
#: Sides of the square grids measured.
_SIDES = (5, 14, 24, 32)
#: Every size has at least this many turns, and more until the seconds are over.
_TURNS, _SECONDS = 5, 3.0
#: A call that takes longer than this, in seconds, is timed twice: beside it, what disturbs is small.
_SLOW = 0.02
#: A call that waited for a processor for more than this share of its time was disturbed.
_WAITED = 0.1


class Line(NamedTuple):
    """Seconds of a call: `overhead` + multiply-accumulates · `rate`."""

    overhead: float
    rate: float

    def seconds(self, macs: float) -> float:
        return self.overhead + macs * self.rate


Lines = Mapping[str, Line]
#: Marks lines that are not to be kept beyond this process.
_UNSAVED = "unsaved-"
#: The lines of each machine and number of threads, by type and by name. They only ever grow.
_known: dict[str, dict[str, dict[str, Line]]] = {}
_tried: set[tuple[str, torch.dtype, str]] = set()
#: The machines and numbers of threads whose lines were disturbed.
_disturbed: set[str] = set()
_edition = 0


def edition() -> int:
    """A number that is another one whenever there is something new to know."""
    _lines()
    return _edition


def seconds(backend: Backend, case: Case) -> float | None:
    """What a call should take on the present number of threads; None if that is not known. It never measures."""
    if case.device != "cpu":
        return None
    line = known(case.dtype).get(line_name(backend, backend.line(case)))
    return None if line is None else line.seconds(backend.macs(case))


def known(dtype: torch.dtype) -> Lines:
    """The lines for the present number of threads, as far as they were ever measured here."""
    return _lines().get(_type(dtype), {})


def measured(dtype: torch.dtype = torch.float32) -> Lines:
    """The lines of every backend for the present number of threads; those missing are measured now, in seconds."""
    every = {(_key(), dtype, line_name(one)): one for one in every_backend() if one.serves("cpu")}
    missing = {what: one for what, one in every.items() if what not in _tried and not _has(one, dtype)}
    _tried.update(missing)  # one that refuses all there is to try has no cost, however often it is asked
    if missing and (dtype is torch.float32 or survives(dtype)):
        lines, calm = _measure(list(missing.values()), dtype)
        learn(dtype, lines)
        if not calm:
            _disturbed.add(_key())
        with contextlib.suppress(OSError):
            if not disturbed():
                _write(_file(_key()), _lines())
    return known(dtype)


def disturbed() -> bool:
    """Whether what is known for the present number of threads was measured while other programs held the processors."""
    return _key() in _disturbed


def learn(dtype: torch.dtype, lines: Lines) -> None:
    """Take these lines for known."""
    global _edition
    _lines().setdefault(_type(dtype), {}).update(lines)
    _edition += 1


def forget() -> None:
    """Know nothing but what the file says."""
    global _edition
    _known.clear()
    _tried.clear()
    _disturbed.clear()
    _edition += 1


@contextlib.contextmanager
def assumed(lines: Lines, *dtypes: torch.dtype) -> Iterator[None]:
    """For a while these lines, made up, are all that is known on the present number of threads. For tests."""
    global _edition
    before = dict(_known)
    _known.clear()
    _known[_key()] = {_type(dtype): dict(lines) for dtype in dtypes or (torch.float32,)}
    _edition += 1
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)
        _edition += 1


def line_name(backend: Backend, line: str = "") -> str:
    """`foveal native few`; with a digest of its file if it is a user's own, which may have been edited since. What was
    typed into a console has no file: its lines are this process's, and of this definition."""
    source, ours = source_of(type(backend)), type(backend).__module__.startswith("attendless.")
    whose = "" if ours else _edited(source) if source else f"{_UNSAVED}{id(type(backend))}"
    return " ".join(filter(None, (backend.op, backend.name, whose, line)))


@lru_cache(maxsize=64)
def _edited(source: str) -> str:
    return hashlib.blake2b(Path(source).read_bytes(), digest_size=4).hexdigest() if source else ""


def _has(backend: Backend, dtype: torch.dtype) -> bool:
    prefix = line_name(backend)
    return any(name == prefix or name.startswith(f"{prefix} ") for name in known(dtype))


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Measuring -----------------------------------------------------------------------------------------------------------


def _measure(backends: Sequence[Backend], dtype: torch.dtype) -> tuple[dict[str, Line], bool]:
    """The lines, and whether no other program held the processors at every attempt to measure one of them."""
    found: list[tuple[str, Probe]] = []
    for side in _SIDES:
        for backend in backends:
            probes = backend.probe(samples(backend.op, side, dtype))
            found += [(line_name(backend, probe.line), probe) for probe in probes]
    if not found:
        return {}, True
    best, waits = [math.inf] * len(found), [0.0] * len(found)
    with torch.inference_mode():
        start, turn = time.perf_counter(), 0
        while turn < _TURNS or time.perf_counter() - start < _SECONDS:
            for i, (_, probe) in enumerate(found):
                if turn > 1 and best[i] > _SLOW:
                    continue
                if turn == 0 or best[i] <= _SLOW:
                    probe.call()  # to warm up, and because whoever came before has the caches
                best[i], waits[i] = min((best[i], waits[i]), _time(probe))
            turn += 1
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, probe), elapsed in zip(found, best, strict=True):
        points.setdefault(name, []).append((probe.macs, elapsed))
    calm = all(wait <= _WAITED * elapsed for wait, elapsed in zip(waits, best, strict=True))
    return {name: fit(line) for name, line in points.items()}, calm


def _time(probe: Probe) -> tuple[float, float]:
    """Seconds of a call, and of them those that its threads waited for a processor."""
    waited, began = _waited(), time.perf_counter()
    probe.call()
    elapsed = time.perf_counter() - began
    return elapsed, _waited() - waited


def _waited() -> float:
    """Seconds that the threads of this process were ready and had no processor; 0 where only Linux could tell."""
    total = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(task.read_text().split()[1])
    return 1e-9 * total


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (macs, seconds) with the least squares of relative errors, and no cost below zero."""
    x, y = np.array(points, dtype=float).T
    columns = np.stack([1 / y, x / y], axis=1)
    overhead, rate = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
    if overhead < 0:
        overhead, rate = 0.0, 1 / float(np.mean(x / y))
    elif rate < 0:
        overhead, rate = 1 / float(np.mean(1 / y)), 0.0
    return Line(float(overhead), float(rate))


@lru_cache(maxsize=8)
def survives(dtype: torch.dtype) -> bool:
    """Whether products in this type run here. Some CPUs announce instructions and die on them, so a child tries."""
    trial = f"import torch; a = torch.ones(64, 64, dtype={dtype}); a @ a"
    return subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode == 0


# Keeping -------------------------------------------------------------------------------------------------------------


def _lines() -> dict[str, dict[str, Line]]:
    """What is known for the present number of threads; the first time, what the file says."""
    global _edition
    key = _key()
    if key not in _known:
        _known[key] = _read(_file(key))
        _edition += 1
    return _known[key]


def _key() -> str:
    return _digest(torch.get_num_threads(), compiled.instruction_set())


@lru_cache(maxsize=64)
def _digest(threads: int, instructions: str | None) -> str:
    """What the costs depend on, as a short text: another machine, version or number of threads has others."""
    parts = [_VERSION, processor(), torch.__version__, instructions, threads]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _file(key: str) -> Path:
    return cache_folder() / f"costs-{key}.json"


def _write(path: Path, lines: Mapping[str, Lines]) -> None:
    with atomic(path) as temporary:
        kept = {dtype: {name: line for name, line in of.items() if _UNSAVED not in name} for dtype, of in lines.items()}
        temporary.write_text(json.dumps(kept, indent=1))


def _read(path: Path) -> dict[str, dict[str, Line]]:
    """The lines in a file; none if it is not there, or not what was written."""
    try:
        found = {
            str(dtype): {str(name): Line(*map(float, line)) for name, line in lines.items()}
            for dtype, lines in json.loads(path.read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    every = [x for lines in found.values() for line in lines.values() for x in line]
    return found if all(math.isfinite(x) and x >= 0 for x in every) else {}
