"""What each way to compute attention costs on this machine: seconds = overhead + multiply-accumulates · rate.

A few sizes of each kernel take turns for a few seconds, the quickest of each counts, and a line is fitted through them.
That is done once for a machine, a number of threads and a version of PyTorch, and kept as a small JSON file in the
user's cache folder (`$XDG_CACHE_HOME/attendless`). A file that is damaged is made again; a folder that cannot be
written to costs no more than measuring again in the next process.

The lines are for estimates: which of two ways is quicker, and about how long. `bench` measures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from ..storage import atomic
from . import basis, chosen, foveal, gather, native, ops, patterns

_VERSION = 7
#: Sides of the square grids measured; heads and head width of a small ViT.
_SIDES, _HEADS, _WIDTH = (14, 24, 32), 3, 64
#: Every size has at least this many turns, and more until the seconds are over.
_TURNS, _SECONDS = 5, 3.0


class Line(NamedTuple):
    """Seconds of a call: `overhead` + multiply-accumulates · `rate`."""

    overhead: float
    rate: float

    def seconds(self, macs: float) -> float:
        return self.overhead + macs * self.rate


Costs = Mapping[str, Line]
_known: dict[str, Costs] = {}


def kernel(op: str, path: str, queries: float = 16) -> str:
    """The name of a line. Native kernels have several: the fewer queries share their keys, the more each must load."""
    if path != "native" or op in ("gather", "sparsifiner") or queries > 4:
        return f"{op} {path}"
    return f"{op} {path} {'alone' if queries == 1 and op == 'foveal' else 'few'}"


def known() -> Costs | None:
    """The costs for the present number of threads, if they were ever measured here. It never measures."""
    name = _name()
    if name not in _known:
        found = _read(_file(name))
        if found is None:
            return None
        _known[name] = found
    return _known[name]


def measured() -> Costs:
    """The costs for the present number of threads; measured now, in seconds, if they never were."""
    found = known()
    if found is None:
        found = _known[_name()] = _measure()
        with contextlib.suppress(OSError):
            _write(_file(_name()), found)
    return found


# Measuring -----------------------------------------------------------------------------------------------------------


def _measure() -> Costs:
    runs = [run for side in _SIDES for run in _runs(side)]
    best = [math.inf] * len(runs)
    with torch.inference_mode():
        start, turn = time.perf_counter(), 0
        while turn <= _TURNS or time.perf_counter() - start < _SECONDS:
            for i, (_, _, call) in enumerate(runs):
                began = time.perf_counter()
                call()
                if turn:  # the first is to warm up
                    best[i] = min(best[i], time.perf_counter() - began)
            turn += 1
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, macs, _), seconds in zip(runs, best, strict=True):
        points.setdefault(name, []).append((macs, seconds))
    return {name: fit(line) for name, line in points.items()}


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


def _runs(side: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Name, multiply-accumulates and call of everything that is measured on a grid of side × side."""
    from .blocks import attend_in_torch, plan

    N, dim, scale = side * side, _HEADS * _WIDTH, _WIDTH**-0.5
    random = torch.Generator().manual_seed(side)
    q, k, v = torch.randn(1, N, 3, _HEADS, _WIDTH, generator=random).permute(2, 0, 3, 1, 4).unbind(0)
    yield kernel("full", "sdpa"), 2 * N * N * dim, partial(F.scaled_dot_product_attention, q, k, v)

    layout = foveal.layout(side, side, keep=0.1, cell=2, tile=4, coarse=0)
    cells = foveal.select(q, k, layout, scale=scale)
    masked = partial(foveal.attend, q, k, v, cells, layout, scale=scale)
    yield kernel("foveal", "torch"), foveal_executed(layout, dim), masked

    pattern = patterns.window_pattern(patterns.grid_blocks(side, side, 0, 4), 1)
    batched = partial(attend_in_torch, q, k, v, plan(pattern, _HEADS), scale=scale)
    yield kernel("block", "torch"), 2 * pattern.edges(_HEADS) * _WIDTH, batched

    rank = min(32, N // 4)
    down, up = basis.pooling(side, side, 0, rank)

    def guess() -> torch.Tensor:
        return torch.softmax(scale * q @ (down @ k).transpose(-2, -1), dim=-1)

    def choose_and_mask() -> torch.Tensor:  # choosing is most of it
        return chosen.attend(q, k, v, chosen.largest(guess() @ up, N // 10), scale=scale)

    yield kernel("sparsifiner", "torch"), 2 * N * (N + rank) * dim, choose_and_mask

    if not native.available:
        return

    def choose_and_attend() -> torch.Tensor:
        return torch.ops.attendless.sparsifiner(
            q, k, v, None, guess(), up, None, None, None, N // 10, 0, 0.0, 0, scale
        )  # fmt: skip

    yield kernel("sparsifiner", "native"), 2 * N * (N // 10 + rank) * dim + N * N * _HEADS * rank, choose_and_attend

    for shared in (1, 2, 4):  # the side of a tile
        layout = dataclasses.replace(layout, tile=shared)
        sizes = list(dataclasses.astuple(layout))
        fused = partial(torch.ops.attendless.foveal_forward, q, k, v, None, None, sizes, scale)
        yield kernel("foveal", "native", shared**2), foveal.macs(layout, dim), fused

    for shared in (2, 4):  # the side of a block
        pattern = patterns.window_pattern(patterns.grid_blocks(side, side, 0, shared), 1)
        listed = partial(torch.ops.attendless.block_attend, q, k, v, None, ops.block_lists(pattern), scale)
        yield kernel("block", "native", shared**2), 2 * pattern.edges(_HEADS) * _WIDTH, listed

    lists = torch.rand(1, _HEADS, N, N, generator=random).argsort(-1)[..., : N // 10].int()
    gathered = partial(gather.gather_attend, q, k, v, lists, scale=scale)
    yield kernel("gather", "native"), 2 * lists.numel() * _WIDTH, gathered


def foveal_executed(layout: foveal.Layout, dim: int) -> int:
    """What the masked dense products of foveal attention in PyTorch execute, for one image."""
    keys = layout.prefix + layout.patches + layout.cells + layout.coarse_cells
    return dim * (layout.tiles * layout.cells + 2 * (layout.prefix + layout.patches) * keys)


# Keeping -------------------------------------------------------------------------------------------------------------


def _name() -> str:
    """What the costs depend on, as a short text: another machine, version or number of threads has others."""
    parts = [_VERSION, _processor(), torch.__version__, native.path(), torch.get_num_threads()]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _processor() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("model name")), "")
    import platform

    return platform.processor() or platform.machine()


def _file(name: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "attendless" / f"costs-{name}.json"


def _write(path: Path, costs: Costs) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps({name: list(line) for name, line in costs.items()}, indent=1))


def _read(path: Path) -> Costs | None:
    """The costs in a file, or None if it is not there, or not what was written."""
    try:
        found = {str(name): Line(*map(float, line)) for name, line in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    good = all(math.isfinite(x) and x >= 0 for line in found.values() for x in line)
    return found if good and kernel("full", "sdpa") in found else None
