"""Cuts a flat block into ranges and runs a kernel over them on a few threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

__all__ = ["RANGE_ELEMENTS", "KernelThreads", "cut", "default_num_threads", "elements_per_call", "share_out"]

RANGE_ELEMENTS = 1 << 20
"""Elements one thread takes at a time: long enough to hide the call, short enough to share out evenly."""


_FEWEST_ELEMENTS = 1 << 16
_CALLS_PER_THREAD = 4


def default_num_threads() -> int:
    """Return the number of CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cut(start: int, stop: int, elements: int = RANGE_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Cut `[start, stop)` into consecutive ranges of `elements`, the last one shorter."""
    for begin in range(start, stop, elements):
        yield begin, min(begin + elements, stop)


def elements_per_call(num_elements: int, num_threads: int) -> int:
    """Return how many elements a call takes where many small arrays are shared out; at least 1."""
    if num_threads == 1:
        return max(1, num_elements)
    return min(RANGE_ELEMENTS, max(_FEWEST_ELEMENTS, -(-num_elements // (_CALLS_PER_THREAD * num_threads))))


def share_out(sizes: Sequence[int], at_once: int) -> list[tuple[int, int]]:
    """Cut consecutive items into calls of about `at_once` elements: first item, one past the last.

    Args:
        sizes: elements of each item, at most `at_once`.
    """
    calls: list[tuple[int, int]] = []
    first = elements = 0
    for number, size in enumerate(sizes):
        if elements and elements + size > at_once:
            calls.append((first, number))
            first, elements = number, 0
        elements += size
    if first < len(sizes):
        calls.append((first, len(sizes)))
    return calls


class KernelThreads:
    """Runs one kernel call per range, on the calling thread or on a pool.

    The pool starts with the first call that has work for it, never before. Several threads may call `run` at once.

    Args:
        num_threads: Threads that compute, at least 1; 1 computes on the calling thread. None: one per usable CPU.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = default_num_threads() if num_threads is None else num_threads
        assert self.num_threads >= 1, self.num_threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, calls: Iterable[Callable[[], None]]) -> None:
        """Make every call and return when all are done. The first error is raised, after the others have ended.

        Calls are taken one by one, by the threads that make them: preparing one goes on beside the others.
        """
        remaining, lock = iter(calls), threading.Lock()
        ahead = list(islice(remaining, self.num_threads))
        remaining = chain(ahead, remaining)
        if self.num_threads == 1 or len(ahead) == 1:
            for call in remaining:
                call()
            return

        def worker() -> None:
            while True:
                with lock:
                    call = next(remaining, None)
                if call is None:
                    return
                call()

        futures = [self._executor().submit(worker) for _ in range(len(ahead) - 1)]
        error: BaseException | None = None
        try:
            worker()  # the calling thread is one of the workers: a step never waits for an idle pool
        except BaseException as raised:
            error = raised
        errors = [error, *(future.exception() for future in futures)]
        for raised_error in errors:
            if raised_error is not None:
                raise raised_error

    def close(self) -> None:
        """End the threads. A later `run` starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="optimizer")
            return self._pool
