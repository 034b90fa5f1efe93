"""A store's condition variable. Only the process that created the store can enter it."""

from __future__ import annotations

import os
import threading

from tiered.errors import TieredError

_num_forks = 0  # number of forks between the first process and this one


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class StoreCondition(threading.Condition):
    """Condition that raises ``TieredError`` in a forked child, where a thread that held the lock no longer exists."""

    def __init__(self) -> None:
        super().__init__()
        self._num_forks_at_creation, self._pid = _num_forks, os.getpid()

    @property
    def is_in_forked_child(self) -> bool:
        """Whether this process is a forked child of the process that created the store."""
        return self._num_forks_at_creation != _num_forks

    def __enter__(self) -> bool:
        if self._num_forks_at_creation != _num_forks:
            raise TieredError(
                f"process {os.getpid()} was forked from process {self._pid}, which made this store: the child has"
                " neither the store's memory nor its threads. Use the store only in the process that made it, or start"
                " the child with multiprocessing's 'spawn' and open a store there"
            )
        return super().__enter__()
