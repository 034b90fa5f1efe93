"""Workers: the threads of a link, started when they are first needed."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable


class Workers:
    """Runs jobs on ``num_threads`` daemon threads: urgent ones first, else in order of submission.

    A job that raises is reported through ``threading.excepthook`` and costs neither the thread nor other jobs.

    Args:
        num_patient: threads that urgent jobs leave to others that wait. A drive reads and writes at the same time: with
            all threads on one of the two, half of it idles.
    """

    def __init__(self, num_threads: int, name: str, *, num_patient: int = 0) -> None:
        assert 0 <= num_patient < num_threads, (num_patient, num_threads)
        self._num_threads = num_threads
        self._max_urgent = num_threads - num_patient
        self._num_urgent_running = 0
        self._name = name
        self._changed = threading.Condition()
        self._urgent: deque[Callable[[], None]] = deque()
        self._patient: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, job: Callable[[], None], *, urgent: bool = True) -> None:
        """Queue a job; never blocks."""
        with self._changed:
            assert not self._is_closed, f"{self._name}: job submitted after close"
            (self._urgent if urgent else self._patient).append(job)
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._urgent and not self._patient and not self._is_closed:
                    self._changed.wait()
                if not self._urgent and not self._patient:
                    return
                is_urgent = bool(self._urgent) and (self._num_urgent_running < self._max_urgent or not self._patient)
                job = (self._urgent if is_urgent else self._patient).popleft()
                self._num_urgent_running += is_urgent
            try:
                job()
            except BaseException:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del job  # it may hold the memory of a slot
            with self._changed:
                self._num_urgent_running -= is_urgent

    def close(self) -> None:
        """Run what is queued, then stop the threads. Idempotent; not to be called from a job."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
