"""Cuts a flat block into ranges and runs a kernel over them on a few threads."""

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
        among_operations: The calls come between operations of torch on the CPU. Its OpenMP threads wait for their next
            operation without sleeping, for milliseconds: so they make the calls, where the OpenMP library allows it,
            instead of keeping the cores busy.
    """

    def __init__(self, num_threads: int | None = None, *, among_operations: bool = False) -> None:
        self._openmp = _openmp_parallel() if among_operations else None
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

        errors = self._run_on_openmp(worker, len(ahead)) if self._openmp else self._run_on_pool(worker, len(ahead))
        for error in errors:
            raise error

    def _run_on_pool(self, worker: Callable[[], None], num_threads: int) -> list[BaseException]:
        futures = [self._executor().submit(worker) for _ in range(num_threads - 1)]
        errors = _errors_of(worker)  # the calling thread is one of the workers: a step never waits for an idle pool
        return errors + [error for future in futures if (error := future.exception()) is not None]

    def _run_on_openmp(self, worker: Callable[[], None], num_threads: int) -> list[BaseException]:
        errors: list[BaseException] = []
        call = _OPENMP_BODY(lambda _: errors.extend(_errors_of(worker)))
        assert self._openmp is not None
        with _interrupts_held():
            self._openmp(call, None, num_threads, 0)  # returns when every thread of the team is done
        return errors

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


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Answer a Ctrl-C that comes inside at the end: what it raises in a function that C calls is printed and lost.

    Only the main thread answers signals; in another one there is nothing to hold.
    """
    answer = signal.getsignal(signal.SIGINT)
    if not callable(answer) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        if came:
            answer(*came[0])


_OPENMP_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp_parallel() -> Any:
    """Return the entry of the OpenMP library that torch has loaded: body, its argument, threads, flags. None: has none.

    GCC's library and LLVM's both have it, under this name.
    """
    import torch

    has_openmp: bool = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if has_openmp else None
    if parallel is not None:
        parallel.argtypes = [_OPENMP_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
    return parallel


def _errors_of(worker: Callable[[], None]) -> list[BaseException]:
    try:
        worker()
    except BaseException as error:
        return [error]
    return []
