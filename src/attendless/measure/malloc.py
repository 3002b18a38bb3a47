"""Make the process retain freed memory.

By default, glibc returns some large freed blocks to the system, depending on their position in the heap. A model that
allocates its activations layer by layer then pays for new pages in some calls and not in others: up to a sixth of its
latency, and a different order of the same calls changes which calls pay.
"""

from __future__ import annotations

import contextlib
import ctypes

#: glibc's numbers of the `mallopt` options, and the largest value of the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _LARGEST = -1, -3, 32 << 20


def keep_memory() -> None:
    """Retain freed memory from now on, for the rest of the process. No-op on C libraries other than glibc."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
