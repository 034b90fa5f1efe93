"""Threads that run kernels over ranges of flat blocks."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from types import FrameType
from typing import Any

__all__ = [
    "RANGE_ELEMENTS",
    "KernelThreads",
    "cut",
    "default_num_threads",
    "elements_per_call",
    "group_calls",
    "num_update_threads",
]

RANGE_ELEMENTS = 1 << 20
"""Elements per kernel call: enough to hide the call's overhead, and few enough to balance the threads."""

_MIN_CALL_ELEMENTS = 1 << 16
_CALLS_PER_THREAD = 4


def default_num_threads() -> int:
    """Return the number of CPUs that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_update_threads(device_type: str) -> int:
    """Return the number of threads that update blocks on the host.

    Updates run while a GPU computes, so two cores stay free: one launches kernels, and the other starts copies.
    """
    num_cores = default_num_threads()
    return max(1, num_cores - 2) if device_type == "cuda" else num_cores


def cut(start: int, stop: int, elements: int = RANGE_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Split `[start, stop)` into consecutive ranges of `elements`. The last range can be shorter."""
    for range_start in range(start, stop, elements):
        yield range_start, min(range_start + elements, stop)


def elements_per_call(num_elements: int, num_threads: int) -> int:
    """Return the number of elements per call when many small arrays are updated; at least 1."""
    if num_threads == 1:
        return max(1, num_elements)
    return min(RANGE_ELEMENTS, max(_MIN_CALL_ELEMENTS, -(-num_elements // (_CALLS_PER_THREAD * num_threads))))


def group_calls(sizes: Sequence[int], max_elements: int) -> list[tuple[int, int]]:
    """Group consecutive items into calls of at most `max_elements` elements. Return each call as `(start, stop)`.

    Args:
        sizes: Number of elements of each item, at most `max_elements`.
    """
    calls: list[tuple[int, int]] = []
    start = elements = 0
    for index, size in enumerate(sizes):
        if elements and elements + size > max_elements:
            calls.append((start, index))
            start, elements = index, 0
        elements += size
    if start < len(sizes):
        calls.append((start, len(sizes)))
    return calls


class KernelThreads:
    """Threads that run kernel calls: the calling thread, a pool, or torch's OpenMP threads.

    The pool starts with the first call that needs it. Several threads can call `run` concurrently.

    Args:
        num_threads: Number of compute threads; 1 to use only the calling thread. Default: one per usable CPU.
        is_interleaved: Whether calls alternate with torch's CPU operations. After an operation, torch's OpenMP
            threads spin for milliseconds. To avoid competing with these threads, calls run on them if the OpenMP
            library allows it.
    """

    def __init__(self, num_threads: int | None = None, *, is_interleaved: bool = False) -> None:
        self._openmp = _openmp_parallel() if is_interleaved else None
        self.num_threads = default_num_threads() if num_threads is None else num_threads
        assert self.num_threads >= 1, self.num_threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, calls: Iterable[Callable[[], None]]) -> None:
        """Run every call, wait for all of them, and raise the first error.

        Threads take calls from the iterator one at a time, so later calls are prepared while earlier calls run.
        """
        queue, lock = iter(calls), threading.Lock()
        batch = list(islice(queue, self.num_threads))
        queue = chain(batch, queue)
        if self.num_threads == 1 or len(batch) == 1:
            for call in queue:
                call()
            return

        def worker() -> None:
            while True:
                with lock:
                    call = next(queue, None)
                if call is None:
                    return
                call()

        errors = self._run_on_openmp(worker, len(batch)) if self._openmp else self._run_on_pool(worker, len(batch))
        for error in errors:
            raise error

    def _run_on_pool(self, worker: Callable[[], None], num_threads: int) -> list[BaseException]:
        futures = [self._executor().submit(worker) for _ in range(num_threads - 1)]
        errors = _catch_errors(worker)  # the calling thread also computes, instead of waiting for the pool to start
        return errors + [error for future in futures if (error := future.exception()) is not None]

    def _run_on_openmp(self, worker: Callable[[], None], num_threads: int) -> list[BaseException]:
        errors: list[BaseException] = []
        call = _OPENMP_BODY(lambda _: errors.extend(_catch_errors(worker)))
        assert self._openmp is not None
        with _defer_interrupts():
            self._openmp(call, None, num_threads, 0)  # returns after all threads of the team have finished
        return errors

    def close(self) -> None:
        """Stop the threads. A later `run` starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="optimizer")
            return self._pool


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, because Python prints exceptions in C callbacks without raising them.

    Python handles signals in the main thread, so the context manager does nothing in other threads.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda signum, frame: signals.append((signum, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            handler(*signals[0])


_OPENMP_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp_parallel() -> Any:
    """Return the function `GOMP_parallel(body, argument, num_threads, flags)` of torch's OpenMP library, if exported.

    The libraries of GCC and LLVM export this function.
    """
    import torch

    has_openmp: bool = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if has_openmp else None
    if parallel is not None:
        parallel.argtypes = [_OPENMP_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
    return parallel


def _catch_errors(worker: Callable[[], None]) -> list[BaseException]:
    try:
        worker()
    except BaseException as error:
        return [error]
    return []
