"""Allocator: keep freed memory in the process on CPU ranks, instead of giving it back every step.

glibc gives blocks over 32 MiB back to the system as soon as they are freed, and the top of its heap too. A
training step frees and takes the same large blocks again and again, and every page of them is then mapped and
zeroed anew: a tenth of the step's time where gradients are of that size.
"""

import ctypes
import sys

# from glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_memory() -> bool:
    """Tell glibc to map no block by itself and to trim nothing; False where the C library is another.

    The process then holds what it has once needed until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))
