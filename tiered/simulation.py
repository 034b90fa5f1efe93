"""Simulated tiers and links in virtual time. The store makes its usual decisions; transfers take nominal time.

No bytes move and no memory is allocated. Waiting runs the next event, so everything happens on the caller's thread in a
deterministic order. The plan uses the simulation to predict the duration and the stalls of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import torch

from tiered.condition import StoreCondition
from tiered.links.base import LinkUsage
from tiered.tiers.base import Ledger, Slot, TierUsage
from tiered.tiers.pool import SlabPool
from tiered.transfer import Transfer
from tiered.units import MiB

#: A simulated drive or bus moves parts of this size. An urgent transfer waits only for the current part.
PART_BYTES = 16 * MiB


class SimulatedClock(StoreCondition):
    """Virtual clock and condition of a store. Waiting runs the next event. For use by a single thread.

    Attributes:
        now_s: seconds since the start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Schedule a call to ``event`` at ``time_s``."""
        heapq.heappush(self._events, (time_s, self._num_events, event))
        self._num_events += 1

    def advance(self, seconds: float) -> None:
        """Advance the clock, and run all events that become due."""
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self._run_next()
        self.now_s = end_s

    def wait(self, timeout: float | None = None) -> bool:
        """Run the next event. At least one event must be pending, because otherwise the wait would never end."""
        assert self._events, "the store waits although no event is pending"
        self._run_next()
        return True

    def _run_next(self) -> None:
        time_s, _, event = heapq.heappop(self._events)
        self.now_s = max(self.now_s, time_s)
        event()


class SimulatedTier:
    """A tier that only counts bytes and buffers.

    Args:
        slot_bytes: function that returns the slot size for a number of bytes of contents.
        addressable: whether leases can use the tier. False for a file tier.
        is_read_only: whether home slots have their contents from the start.

    Attributes:
        num_drops: number of buffers dropped to make buffers of other sizes. 0 if the tier is not addressable.
    """

    alignment_bytes = 1
    durable = False

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        slot_bytes: Callable[[int], int],
        *,
        addressable: bool = True,
        is_read_only: bool = False,
    ) -> None:
        self.name, self.capacity_bytes, self.slot_bytes = name, capacity_bytes, slot_bytes
        self.device = torch.device("cpu") if addressable else None
        self.is_read_only = is_read_only
        self.num_drops = 0
        self._ledger = Ledger(name, capacity_bytes)
        self._pool = SlabPool(self._ledger, make=lambda nbytes: nbytes, drop=self._drop)

    def _drop(self, buffer: int) -> None:
        self.num_drops += self.device is not None  # Dropped files do not count.

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        slot_bytes = self.slot_bytes(nbytes)
        buffer = self._pool.take(slot_bytes)
        return None if buffer is None else Slot(self.name, nbytes, slot_bytes, buffer)

    def free(self, slot: Slot) -> None:
        self._pool.give(slot.slot_bytes, slot.slot_bytes)

    def keep_buffers(self, counts: Mapping[int, int]) -> None:
        self._pool.keep(counts)

    def has_buffer(self, nbytes: int) -> bool:
        return self._pool.has(self.slot_bytes(nbytes))

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def reserve(self, nbytes: int) -> None:
        self._pool.reserve(nbytes)

    def sync(self) -> None:
        pass

    def usage(self) -> TierUsage:
        return self._ledger.usage()

    def close(self) -> None:
        pass


class SimulatedChannel:
    """Rate and queue that the links of a drive or bus share. Links with a lower ``priority`` go first; otherwise FIFO.

    Attributes:
        busy_s: total seconds of all started parts.
    """

    def __init__(self, clock: SimulatedClock, rate_bytes_per_s: float) -> None:
        assert rate_bytes_per_s > 0, rate_bytes_per_s
        self._clock, self._rate = clock, rate_bytes_per_s
        self._waiting: list[tuple[int, int, SimulatedLink, Transfer, int]] = []
        self.num_submitted = 0
        self._is_busy = False
        self.busy_s = 0.0

    def submit(self, link: SimulatedLink, transfer: Transfer) -> None:
        """Queue a link's transfer."""
        self._push(link, transfer, transfer.nbytes, self.num_submitted)
        self.num_submitted += 1
        self._begin()

    def _push(self, link: SimulatedLink, transfer: Transfer, remaining_bytes: int, sequence_number: int) -> None:
        heapq.heappush(self._waiting, (link.priority, sequence_number, link, transfer, remaining_bytes))

    def _begin(self) -> None:
        if self._is_busy or not self._waiting:
            return
        _, sequence_number, link, transfer, remaining_bytes = heapq.heappop(self._waiting)
        part_bytes = min(remaining_bytes, PART_BYTES)
        self._is_busy = True
        self.busy_s += part_bytes / self._rate
        on_end = lambda: self._end(link, transfer, remaining_bytes - part_bytes, sequence_number)  # noqa: E731
        self._clock.at(self._clock.now_s + part_bytes / self._rate, on_end)

    def _end(self, link: SimulatedLink, transfer: Transfer, remaining_bytes: int, sequence_number: int) -> None:
        self._is_busy = False
        if remaining_bytes:
            self._push(link, transfer, remaining_bytes, sequence_number)
            self._begin()
            return
        self._begin()
        link.num_bytes += transfer.nbytes
        transfer.finish()


class SimulatedLink:
    """Simulated one-way link between two tiers.

    Args:
        channel: rate and queue. Links can share a channel, for example both directions of a drive.
        priority: order in the queue; smaller values go first.
    """

    path = "simulated"

    def __init__(self, src: str, dst: str, channel: SimulatedChannel, *, priority: int = 0) -> None:
        self.src, self.dst, self.priority = src, dst, priority
        self.num_bytes = 0
        self._channel = channel

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._channel.submit(self, transfer)
        return transfer

    def usage(self) -> LinkUsage:
        return LinkUsage(self.num_bytes, self._channel.busy_s, 0, 0, self.path)

    def close(self) -> None:
        pass
