"""The cost of each backend on this machine: seconds = overhead + multiply-accumulates · rate.

Each operation is timed at a few sizes, interleaved, for a few seconds. The fastest call at each size counts, and a line
is fitted through these points. This is done once per machine, number of threads, PyTorch version and dtype. The lines
are stored as a small JSON file in the user's cache folder (`$XDG_CACHE_HOME/attendless`). A backend that is registered
later is measured when its cost is first requested. A damaged file is written again. If the folder is not writable, the
next process measures again. Lines measured while other programs used the processors serve this process only, and
reports say that the machine was busy.

The lines give estimates: which of two backends is faster, and by about how much. For exact figures use `bench`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import sys
import threading
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
from .backend import Backend, Case, Probe, every_backend, samples

_VERSION = 9
#: Sides of the square grids measured.
_SIDES = (5, 14, 24, 32)
#: Every size is timed at least this often, and more often until the seconds are over.
_TURNS, _SECONDS = 5, 3.0
#: A call longer than this, in seconds, is timed only twice: disturbances are small in comparison.
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
#: Marks lines that are not written to the file.
_UNSAVED = "unsaved-"
#: The lines of each machine and number of threads, by dtype and by name.
_known: dict[str, dict[str, dict[str, Line]]] = {}
_tried: set[tuple[str, torch.dtype, str]] = set()
#: The machines and numbers of threads whose lines were measured on a busy machine.
_disturbed: set[str] = set()
_edition = 0
#: Held while the values above change, and while costs are measured: two threads would disturb each other.
_lock = threading.RLock()


def edition() -> int:
    """Version counter of the known costs; increases whenever they change."""
    _lines()
    return _edition


def seconds(backend: Backend, case: Case) -> float | None:
    """The estimated seconds of a call on the present number of threads; None if unknown. Never measures."""
    if case.device != "cpu":
        return None
    line = known(case.dtype).get(line_name(backend, backend.line(case)))
    return None if line is None else line.seconds(backend.macs(case))


def known(dtype: torch.dtype) -> Lines:
    """The lines known for the present number of threads."""
    return _lines().get(_type(dtype), {})


def measured(dtype: torch.dtype = torch.float32) -> Lines:
    """The lines of every backend for the present number of threads. Missing lines are measured, in seconds."""
    with _lock:
        return _measured(dtype)


def _measured(dtype: torch.dtype) -> Lines:
    every = {(_key(), dtype, line_name(one)): one for one in every_backend() if one.serves("cpu")}
    missing = {what: one for what, one in every.items() if what not in _tried and not _has(one, dtype)}
    _tried.update(missing)  # a backend that refuses every sample has no cost: do not try it again
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
    """Whether the lines for the present number of threads were measured on a busy machine."""
    return _key() in _disturbed


def learn(dtype: torch.dtype, lines: Lines) -> None:
    """Add lines to those known, in this process."""
    global _edition
    with _lock:
        _lines().setdefault(_type(dtype), {}).update(lines)
        _edition += 1


def forget() -> None:
    """Drop the lines of this process; the next request reads the file again."""
    global _edition
    with _lock:
        _known.clear()
        _tried.clear()
        _disturbed.clear()
        _edition += 1


@contextlib.contextmanager
def assumed(lines: Lines, *dtypes: torch.dtype) -> Iterator[None]:
    """Inside a `with` block, these invented lines are all that is known, in every thread. For tests."""
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
    """The name of a cost line, such as `foveal native few`.

    For a user's backend it contains a digest of the source file, so that an edited backend is measured again. A backend
    that was defined in a console has no file: its lines are not stored.
    """
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
    """The lines, and whether each has points that were measured without waiting for a processor."""
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
                    probe.call()  # warm up: the call before has filled the caches
                best[i], waits[i] = min((best[i], waits[i]), _time(probe))
            turn += 1
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, probe), elapsed in zip(found, best, strict=True):
        points.setdefault(name, []).append((probe.macs, elapsed))
    calm = all(wait <= _WAITED * elapsed for wait, elapsed in zip(waits, best, strict=True))
    return {name: fit(line) for name, line in points.items()}, calm


def _time(probe: Probe) -> tuple[float, float]:
    """Seconds of a call, and the seconds in it that its threads waited for a processor."""
    waited, began = _waited(), time.perf_counter()
    probe.call()
    elapsed = time.perf_counter() - began
    return elapsed, _waited() - waited


def _waited() -> float:
    """Seconds that the threads of this process were runnable without a processor; 0 except on Linux."""
    total = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(task.read_text().split()[1])
    return 1e-9 * total


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (macs, seconds) with the least squared relative error and non-negative coefficients."""
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
    """Whether matrix products in this dtype run here. A child process tries: some CPUs crash on instructions that they
    report as supported."""
    trial = f"import torch; a = torch.ones(64, 64, dtype={dtype}); a @ a"
    return subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode == 0


# Storing -------------------------------------------------------------------------------------------------------------


def _lines() -> dict[str, dict[str, Line]]:
    """The lines for the present number of threads, by dtype. The first call reads the file."""
    global _edition
    key = _key()
    found = _known.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _known:
            _known[key] = _read(_file(key))
            _edition += 1
        return _known[key]


def _key() -> str:
    return _digest(torch.get_num_threads(), compiled.instruction_set())


@lru_cache(maxsize=64)
def _digest(threads: int, instructions: str | None) -> str:
    """A digest of what the costs depend on: machine, versions, number of threads."""
    parts = [_VERSION, processor(), torch.__version__, instructions, threads]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _file(key: str) -> Path:
    return cache_folder() / f"costs-{key}.json"


def _write(path: Path, lines: Mapping[str, Lines]) -> None:
    with atomic(path) as temporary:
        kept = {dtype: {name: line for name, line in of.items() if _UNSAVED not in name} for dtype, of in lines.items()}
        temporary.write_text(json.dumps(kept, indent=1))


def _read(path: Path) -> dict[str, dict[str, Line]]:
    """The lines in a file; empty if the file is missing or damaged."""
    try:
        found = {
            str(dtype): {str(name): Line(*map(float, line)) for name, line in lines.items()}
            for dtype, lines in json.loads(path.read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    every = [x for lines in found.values() for line in lines.values() for x in line]
    return found if all(math.isfinite(x) and x >= 0 for x in every) else {}
