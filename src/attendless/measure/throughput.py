"""The batch size with the highest throughput."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .clock import Call, Timer, warm_up

#: If a doubling gains less than this, the plateau is reached.
GAIN = 1.03


def best_batch(
    forward: Callable[[int], Call], timer: Timer, *, limit: int = 256, budget: float = 10.0
) -> tuple[int, float]:
    """Double the batch while throughput grows; return the best batch and its throughput in images/s.

    `forward` makes the call for a batch; `limit` is the largest allowed. The search ends when two doublings in a row
    gain nothing, when memory runs out, or when the next batch would overrun `budget` seconds (every batch
    tried is called twice at least).
    """
    rates: dict[int, float] = {}
    batch, barren, spent = 1, 0, 0.0
    while batch <= limit and barren < 2:
        try:
            seconds = warm_up(forward(batch), timer, limit=max(budget - spent, 0.0))
        except torch.OutOfMemoryError:
            break
        better = batch / seconds > GAIN * max(rates.values(), default=0.0)
        barren = 0 if better else barren + 1
        rates[batch] = batch / seconds
        spent += 4 * seconds
        if spent + 8 * seconds > budget:
            break
        batch *= 2
    if not rates:
        raise torch.OutOfMemoryError("not even one image fits into memory")
    # The smallest batch on the plateau: a larger one only costs memory and latency.
    best = min(b for b, rate in rates.items() if rate * GAIN >= max(rates.values()))
    call, times = forward(best), list[float]()
    while len(times) < 5 and (not times or spent + sum(times) < budget):
        times.append(timer(call))
    return best, best / float(np.median(times))
