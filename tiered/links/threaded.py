"""ThreadedLink: a link made of one function that moves the bytes of a slot."""

from __future__ import annotations

from collections.abc import Callable

from tiered.errors import TieredError, TransferError
from tiered.links.base import LinkUsage
from tiered.links.meter import Meter
from tiered.links.workers import Workers
from tiered.tiers.base import Slot
from tiered.transfer import Transfer

#: Copies the first so many bytes of a slot of the source into one of the destination; raises what went wrong.
Move = Callable[[Slot, Slot, int], None]


class ThreadedLink:
    """One direction between two tiers, moved by a few threads that start with the first transfer. Thread-safe.

    Whatever ``move`` raises ends the transfer: a ``TieredError`` as it is, anything else as a ``TransferError``.

    Args:
        src: names of the tiers.
        dst: names of the tiers.
        path: what to call the way, in statistics.
        move: called on the link's threads as ``move(src_slot, dst_slot, nbytes)``; several at once, for different
            slots.
        num_threads: how many.
    """

    def __init__(self, src: str, dst: str, move: Move, *, path: str, num_threads: int = 2) -> None:
        self.src = src
        self.dst = dst
        self.path = path
        self._move = move
        self._meter = Meter()
        self._workers = Workers(num_threads, f"tiered-{src}-{dst}")

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._meter.start(nbytes)
        self._workers.submit(lambda: self._run(src_slot, dst_slot, nbytes, transfer))
        return transfer

    def _run(self, src_slot: Slot, dst_slot: Slot, nbytes: int, transfer: Transfer) -> None:
        error: TieredError | None = None
        try:
            self._move(src_slot, dst_slot, nbytes)
        except TieredError as cause:
            error = cause
        except Exception as cause:  # a waiter would hang if a transfer did not end: every cause is passed on
            number = cause.errno if isinstance(cause, OSError) else None
            text = f"copy of {nbytes} bytes failed: {cause}"
            error = TransferError(text, tier=f"{self.src}->{self.dst}", errno=number)
            error.__cause__ = cause
        self._meter.end(nbytes, moved=error is None)
        transfer.finish(error)

    def usage(self) -> LinkUsage:
        """Return the counters of this direction."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish what is under way and stop the threads. Idempotent."""
        self._workers.close()
