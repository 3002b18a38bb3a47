"""Which way to compute an attention here, and why. It never changes what is computed, only how soon it is there.

`choose` is given what could compute it and how many multiply-accumulates each would execute, the usual one first. If
the costs of this machine have been measured (`costs`: convert does it, once, in seconds) the quickest by estimate is
taken; if not, the first. `ATTENDLESS_CHOOSE` in the environment decides instead:

    auto              by estimate (the default)
    off               always the first: nothing is measured, and convert's break-even counts multiply-accumulates
    native, flex, torch     that one wherever it can compute the attention
"""

from __future__ import annotations

import dataclasses
import os
from functools import lru_cache

import torch

from ..attention.contract import Choice
from ..errors import unknown
from . import costs, native

_SWITCH = "ATTENDLESS_CHOOSE"
_SETTINGS = ("auto", "off", "native", "flex", "torch")


def setting() -> str:
    """What the environment asks for."""
    found = os.environ.get(_SWITCH) or "auto"
    if found not in _SETTINGS:
        raise unknown(_SWITCH, found, _SETTINGS)
    return found


@dataclasses.dataclass(frozen=True)
class Ways:
    """What could compute an attention: each path with the multiply-accumulates it executes, the usual choice first.

    `queries` is how many queries share their keys (a tile's, or a block's); `why` tells why other paths are missing.
    """

    op: str
    macs: tuple[tuple[str, int], ...]
    queries: float = 16
    device: str = "cpu"
    why: str = ""


def choose(ways: Ways) -> Choice:
    """One of the paths, and the reason."""
    return _choose(ways, setting(), torch.get_num_threads())


@lru_cache(maxsize=1024)
def _choose(ways: Ways, asked: str, threads: int) -> Choice:
    paths = [path for path, _ in ways.macs]
    if asked in paths:
        return Choice(asked, f"asked for by {_SWITCH}={asked}")
    known = costs.known() if asked == "auto" and len(paths) > 1 and ways.device == "cpu" else None
    seconds = {} if known is None else estimates(ways, known)
    if len(seconds) < 2:
        return Choice(paths[0], ways.why or "the usual choice: what it costs was not measured on this machine")
    best, *others = sorted(seconds, key=seconds.__getitem__)
    rest = ", ".join(f"{path} {milliseconds(seconds[path])}" for path in others)
    return Choice(best, f"{milliseconds(seconds[best])} estimated, {rest}, on {threads_text(threads)}")


def estimates(ways: Ways, known: costs.Costs) -> dict[str, float]:
    """Seconds each path takes, for those whose cost is known."""
    lines = {path: costs.kernel(ways.op, path, ways.queries) for path, _ in ways.macs}
    return {path: known[lines[path]].seconds(macs) for path, macs in ways.macs if lines[path] in known}


def against_full(ways: Ways, full: int) -> tuple[float, float] | None:
    """Estimated seconds of an attention, computed the way `choose` would, and of full attention of `full` MACs.

    None where there is no estimate: off the CPU, or if the environment sets `off`. The first time on a machine, this
    measures for a few seconds.
    """
    if setting() == "off" or ways.device != "cpu":
        return None
    known = costs.measured()
    _choose.cache_clear()  # what was chosen before the costs were known
    ours = estimates(ways, known).get(choose(ways).path)
    return None if ours is None else (ours, known[costs.kernel("full", "sdpa")].seconds(full))


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def threads_text(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"


def native_refuses(dtype: torch.dtype, device: str, dropout: float = 0.0) -> str:
    """Why the native kernels cannot take such tensors; empty if they can."""
    if not native.available:
        return native.reason
    if device != "cpu":
        return f"the native kernels run on the CPU, the tensors are on {device}"
    if dtype == torch.float64:
        return "the native kernels compute in 32-bit floats"
    if dropout:
        return "the native kernels do not drop attention weights at random"
    return ""
