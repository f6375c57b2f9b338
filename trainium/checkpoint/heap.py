"""glibc's heap, kept from growing with every tensor."""

import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h


def keep_heap_small() -> None:
    """Fix glibc's mmap threshold at 1 MiB, so that a freed tensor goes back to the system.

    By default the threshold follows the sizes freed, up to 32 MiB, and the heap then grows with every aligned block:
    measured 16 MB per layer for one rank of 368 MB. Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
