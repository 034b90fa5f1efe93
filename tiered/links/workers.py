"""Workers: the threads of a link, started when they are first needed."""

from __future__ import annotations

import heapq
import sys
import threading
from collections.abc import Callable


class Workers:
    """Runs jobs on ``num_threads`` daemon threads, smallest priority first, then in order of submission.

    A job that raises is reported through ``threading.excepthook`` and costs neither the thread nor other jobs.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._changed = threading.Condition()
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._num_submitted = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, job: Callable[[], None], *, priority: int = 0) -> None:
        """Queue a job; never blocks."""
        with self._changed:
            assert not self._is_closed, f"{self._name}: job submitted after close"
            heapq.heappush(self._jobs, (priority, self._num_submitted, job))
            self._num_submitted += 1
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = heapq.heappop(self._jobs)[2]
            try:
                job()
            except BaseException:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del job  # it may hold the memory of a slot

    def close(self) -> None:
        """Run what is queued, then stop the threads. Idempotent; not to be called from a job."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
