"""Treatment of freed tensor memory by the C library: return to the system, or reuse for the next tensors.

Returned pages are created and zeroed again for the next tensor, which makes a step on the CPU a fifth longer (decision
0085). Kept pages form holes between live memory, which no plan counts. So a run that computes on the CPU keeps them
within an op, and between ops only within the plan: with the memory of the next op, the process must not become larger
than planned. By default glibc keeps all pages of tensors of up to 32 MiB.

Settings affect the whole process, including other work in it. With other C libraries this module does nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tiered.units import MiB

__all__ = ["freed_memory_kept", "give_back_beyond_limit", "give_back_freed_memory", "trim"]

#: Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Tensors from this size on are mapped separately, and so returned when they are freed. The first size is for returning
#: all memory. The second, for keeping it, is the largest in glibc's heap. Smaller tensors share it.
_GIVEN_BACK_FROM, _NEVER_KEPT_FROM = 4 * MiB, 32 * MiB
#: Least free end of the heap that glibc returns by itself: the most that mallopt accepts.
_NEVER = 2**31 - 1
#: Freed memory that is kept if the process takes more than planned, because each return costs milliseconds.
_SPARE_BYTES = 16 * MiB
#: Linux file with the pages of this process; the second number counts resident pages.
_STATM = "/proc/self/statm"

#: Store of each open run -> limit of the process's resident memory before an op plus the bytes of the op.
_limits: dict[object, int] = {}


def give_back_freed_memory() -> None:
    """Return large CPU tensors of this process to the system as soon as they are freed."""
    _set_thresholds(_GIVEN_BACK_FROM, 2 * _GIVEN_BACK_FROM)


@contextmanager
def freed_memory_kept(store: object, limit_bytes: int) -> Iterator[None]:
    """Keep memory of freed tensors for the next tensors, inside, and return it if the process exceeds the limit.

    After the last run, large tensors are returned as soon as they are freed.

    Args:
        store: Store of the run whose ops check the limit.
        limit_bytes: Most resident memory of the process, with the bytes that the op computes in.
    """
    if os.path.exists(_STATM) and _set_thresholds(_NEVER_KEPT_FROM, _NEVER):
        _limits[store] = limit_bytes
    else:
        give_back_freed_memory()
    try:
        yield
    finally:
        _limits.pop(store, None)
        if not _limits:
            give_back_freed_memory()
        trim()


def give_back_beyond_limit(store: object, op_bytes: int) -> None:
    """Return all freed memory to the system if an op would exceed its limit. Otherwise it takes some microseconds."""
    limit = _limits.get(store)
    if limit is not None and _resident_bytes() + op_bytes > limit:
        trim()
        # The remaining excess was not free: other code in the process took it, and will keep it at the next op.
        _limits[store] = max(limit, _resident_bytes() + op_bytes + _SPARE_BYTES)


def trim() -> None:
    """Return all whole pages of freed memory to the system."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _resident_bytes() -> int:
    with open(_STATM, "rb", buffering=0) as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _set_thresholds(mapped_from: int, trimmed_from: int) -> bool:
    """Set both thresholds. Return whether the C library accepted them."""
    mallopt = _function("mallopt")
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, mapped_from) and mallopt(_M_TRIM_THRESHOLD, trimmed_from)
    )


def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
