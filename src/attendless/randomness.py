"""Draws that are a pure function of where they are used.

timm's transforms, mixup and PyTorch's layers draw from the global generators of Python, NumPy and PyTorch. `randomness`
seeds the three from a key, such as (seed, epoch, index), and puts them back afterwards: what is drawn does not depend
on which worker draws it, on what was drawn before, or on whether the run was interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

#: The first word of every key, so that draws for different ends never coincide.
PICTURE, ORDER, MIX, DROPOUT, WEIGHTS = range(5)


def key(*numbers: int) -> int:
    """64 well-mixed bits from a tuple of whole numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


@contextlib.contextmanager
def randomness(*numbers: int) -> Iterator[None]:
    """Inside, every global generator of the processor starts from the key `numbers`; afterwards all is as before."""
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
