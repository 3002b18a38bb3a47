"""Random draws as a pure function of a key.

timm's transforms, mixup and PyTorch's layers draw from the global generators of Python, NumPy and PyTorch. `randomness`
seeds the three generators from a key, such as (seed, epoch, index), and restores them afterwards. The draws do not
depend on the worker, on earlier draws, or on interruptions of the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

#: The first number of every key, so that draws for different purposes are independent.
PICTURE, ORDER, MIX, DROPOUT, WEIGHTS = range(5)


def key(*numbers: int) -> int:
    """A 64-bit hash of a tuple of integers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


@contextlib.contextmanager
def randomness(*numbers: int) -> Iterator[None]:
    """Seed the global CPU generators from the key `numbers` inside a `with` block, then restore them.

    The generators belong to the process, so two threads must not use this at the same time.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    bits = key(*numbers)
    try:
        random.seed(bits)
        np.random.seed(bits & 0xFFFFFFFF)
        torch.default_generator.manual_seed(bits & 0x7FFFFFFFFFFFFFFF)
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
