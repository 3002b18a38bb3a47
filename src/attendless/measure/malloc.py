"""Memory that stays with the process.

By default glibc hands large blocks back to the system when they are freed, or keeps them: which, depends on where they
happen to lie. A model that asks for its activations layer by layer then pays for fresh pages or does not, a sixth of
its time, and another order of the same calls changes who pays.
"""

from __future__ import annotations

import contextlib
import ctypes

#: glibc's names for what `mallopt` sets, and the most it takes for the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _LARGEST = -1, -3, 32 << 20


def keep_memory() -> None:
    """Let this process keep what is freed: the next forward wants as much. Elsewhere than with glibc, nothing."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
