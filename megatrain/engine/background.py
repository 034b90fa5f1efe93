"""Updates on the host that run on a thread of their own while a device computes layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType

__all__ = ["BackgroundUpdates"]


class BackgroundUpdates:
    """Runs updates on a thread of its own, one after the other in the order they were started. Used by one thread.

    Whoever is about to use a block of an update waits for it first, and gets its error. As a context manager: when it
    is left, no update runs any more. After an error they end as well, since whoever catches it may free their memory.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None  # its thread starts with the first update
        self._running: deque[tuple[frozenset[str], Future[None]]] = deque()

    def start(self, keys: Iterable[str], update: Callable[[], None]) -> None:
        """Run an update when those before it have ended.

        Args:
            update: ends their leases as well.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="updates")
        self._running.append((frozenset(keys), self._executor.submit(update)))

    def wait_for(self, keys: Collection[str]) -> None:
        """Wait until no update uses any of these blocks. Raises the first error of an update."""
        uses = [number for number, (used, _) in enumerate(self._running, 1) if not used.isdisjoint(keys)]
        self._end(uses[-1] if uses else 0)

    def wait(self) -> None:
        """Wait for all updates. Raises the first error of one."""
        self._end(len(self._running))

    def _end(self, count: int) -> None:
        for _, update in islice(self._running, count):
            update.result()
        for _ in range(count):
            self._running.popleft()

    def __enter__(self) -> BackgroundUpdates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            while self._running:
                self._running[0][1].exception()
                self._running.popleft()
