"""Host updates that run on a separate thread while a device computes layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType


class BackgroundUpdates:
    """Thread that runs updates one at a time, first in, first out. All calls come from one thread.

    Before the caller uses a block, it must wait for the block's update. The wait raises the update's error. After an
    error, the context still waits for all updates on exit, so that the caller can safely free the memory they use.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None  # created with the first update
        self._updates: deque[tuple[frozenset[str], Future[None]]] = deque()

    def start(self, keys: Iterable[str], update: Callable[[], None]) -> None:
        """Run an update on the thread, after all updates that were started earlier.

        Args:
            update: Function that runs the update and ends its leases.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="updates")
        self._updates.append((frozenset(keys), self._executor.submit(update)))

    def wait_for(self, keys: Collection[str]) -> None:
        """Wait until no update uses any of these blocks. Raise the first error if updates have failed."""
        positions = [i for i, (update_keys, _) in enumerate(self._updates, 1) if not update_keys.isdisjoint(keys)]
        self._wait_for_first(positions[-1] if positions else 0)

    def wait(self) -> None:
        """Wait for all updates. Raise the first error if updates have failed."""
        self._wait_for_first(len(self._updates))

    def _wait_for_first(self, count: int) -> None:
        for _, update in islice(self._updates, count):
            update.result()
        for _ in range(count):
            self._updates.popleft()

    def __enter__(self) -> BackgroundUpdates:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is None:
                self.wait()
        finally:
            while self._updates:
                self._updates[0][1].exception()
                self._updates.popleft()
