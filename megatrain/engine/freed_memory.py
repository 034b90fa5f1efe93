"""What the C library does with memory of tensors that were freed: it goes back to the system, or to the next tensors.

Pages that go back are made and zeroed anew for the next tensor, which takes a step on the CPU a fifth longer (decision
0085). Pages that stay lie in holes between what lives, and no plan counts holes. So a run that computes on the CPU
keeps them within an op, and from op to op as far as the plan has room: the memory that the next op computes in must
not make the process larger than the plan says. By default glibc keeps them all, of tensors of up to 32 MiB.

Settings are those of the process, also of what runs in it beside. Nothing here does anything with other C libraries.
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
#: Tensors from this size on are mapped alone, and so given back as they are freed: where all are to be given back, and
#: where they are kept, the largest that glibc takes from its heap. Smaller ones share the heap.
_GIVEN_BACK_FROM, _NEVER_KEPT_FROM = 4 * MiB, 32 * MiB
#: Of the end of the heap, glibc gives back no less by itself; the most that mallopt takes.
_NEVER = 2**31 - 1
#: Freed memory that is kept where the process takes more than was foreseen: giving back takes milliseconds, too.
_ROOM_BESIDE_OTHERS = 16 * MiB
#: Of Linux: pages of this process, the second number those that are resident.
_STATM = "/proc/self/statm"

#: Of each run that is open, by its store: resident memory of the process before an op, with the bytes that it takes.
_limits: dict[object, int] = {}


def give_back_freed_memory() -> None:
    """Have large tensors of the CPU given back to the system as soon as they are freed, in this process."""
    _set_thresholds(_GIVEN_BACK_FROM, 2 * _GIVEN_BACK_FROM)


@contextmanager
def freed_memory_kept(store: object, limit_bytes: int) -> Iterator[None]:
    """Inside, have memory of freed tensors kept for the next ones, and given back where the process takes more.

    After the last run large tensors are given back as they are freed.

    Args:
        store: Of the run whose ops look.
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
    """Give all freed memory back if an op of a run may not begin with it: some microseconds where it may."""
    limit = _limits.get(store)
    if limit is not None and _resident_bytes() + op_bytes > limit:
        trim()
        # What is still there was not free: somebody else in the process took it, and it will not go at the next op.
        _limits[store] = max(limit, _resident_bytes() + op_bytes + _ROOM_BESIDE_OTHERS)


def trim() -> None:
    """Give all whole pages of freed memory back to the system."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _resident_bytes() -> int:
    with open(_STATM, "rb", buffering=0) as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _set_thresholds(mapped_from: int, trimmed_from: int) -> bool:
    """Return whether the C library took both."""
    mallopt = _function("mallopt")
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, mapped_from) and mallopt(_M_TRIM_THRESHOLD, trimmed_from)
    )


def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
