"""How tests compare results in bfloat16 with their definition."""

from __future__ import annotations

import torch
from torch import Tensor


def same_rounding(ours: Tensor, wanted: Tensor, largest: float | None = None) -> None:
    """Equal but for numbers that fp32's own rounding moves across a border between two bfloat16.

    A score that differs in its last bit may round a weight the other way, and a mean that lies just between two numbers
    goes either way, for every query that sees it. Rounding in other places would change every third result.
    """
    assert ours.dtype is wanted.dtype is torch.bfloat16
    assert ours.shape == wanted.shape
    most = float(wanted.abs().max()) if largest is None else largest
    torch.testing.assert_close(ours.float(), wanted.float(), atol=max(2**-8 * most, 1e-30), rtol=2**-7)
    differ = int((ours != wanted).sum())
    few = ours.numel() < 2000  # one mean may be seen by all
    assert few or differ <= 0.2 * ours.numel(), f"{differ} of {ours.numel()} numbers differ"
