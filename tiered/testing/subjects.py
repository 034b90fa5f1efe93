"""Base classes for the suites. They create the tier under test, its neighbour, links and slots."""

from __future__ import annotations

import errno
import threading
import unittest
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from tiered.links.base import Link
from tiered.links.route import default_links
from tiered.tiers.base import Slot, StreamTier, Tier
from tiered.tiers.ram import RamTier
from tiered.transfer import Transfer
from tiered.units import KiB

#: Seconds after which a test step counts as hanging.
TIMEOUT_S = 60.0


class TierSubject(ABC):
    """Base class of the suites. Subclasses create the tier under test.

    Attributes:
        unit_bytes: approximate size of the blocks in the tests, at least four times the tier's alignment.
        takes_copies: whether the tier accepts copies. False for a tier that can only be a home.
    """

    unit_bytes = 64 * KiB
    takes_copies = True

    @abstractmethod
    def make_tier(self, capacity_bytes: int) -> Tier:
        """Return a new, empty tier. The suites close it."""

    def exhaust_memory(self, tier: Tier) -> AbstractContextManager[object]:
        """Return a context in which the machine has less space than the ledger shows (disk full, out of memory).

        Override this if ``allocate`` requests space from the machine. Without an override, the test is skipped.
        """
        raise unittest.SkipTest(f"{type(self).__name__} does not define exhaust_memory() to simulate a lack of space")

    def allocate(self, tier: Tier, nbytes: int, name: str) -> Slot:
        """Return a slot; fail the test if the tier is too full."""
        slot = tier.allocate(nbytes, name=name, home=not self.takes_copies)
        assert slot is not None, f"no space for {nbytes} bytes: {tier.usage()}, slot_bytes {tier.slot_bytes(nbytes)}"
        return slot


class PairSubject(TierSubject):
    """Base class of suites that need a neighbour of the tier, and links to it.

    Attributes:
        is_faster: whether the tier is faster than its neighbour, such as GPU memory next to RAM.
    """

    is_faster = False

    def make_neighbour(self, capacity_bytes: int) -> Tier:
        """Return the tier at the other end of the links. The suites close it."""
        return RamTier(capacity_bytes, pin_memory=False)

    def make_links(self, fast_tier: Tier, slow_tier: Tier) -> Sequence[Link]:
        """Return a link for each direction. The suites close them. Default: ``default_links``."""
        return default_links([fast_tier, slow_tier])

    def fail_transfers(self, fast_tier: Tier, slow_tier: Tier) -> AbstractContextManager[object]:
        """Return a context in which new transfers fail in both directions.

        By default, ``tensor`` of the faster tier fails. Override this if the links do not call ``tensor``.
        """
        return mock.patch.object(fast_tier, "tensor", side_effect=OSError(errno.EIO, "Input/output error"))

    def make_pair(self, fast_bytes: int, slow_bytes: int) -> tuple[Tier, Tier]:
        """Return the faster and the slower tier."""
        if self.is_faster:
            return self.make_tier(fast_bytes), self.make_neighbour(slow_bytes)
        return self.make_neighbour(fast_bytes), self.make_tier(slow_bytes)

    @contextmanager
    def rig(self, num_units: int = 64) -> Iterator[Rig]:
        """Yield both tiers, each with space for ``num_units`` blocks, and their links. Close everything at the end."""
        fast_tier, slow_tier = self.make_pair(num_units * self.unit_bytes, num_units * self.unit_bytes)
        links = self.make_links(fast_tier, slow_tier)

        def close() -> None:
            for link in links:
                link.close()
            fast_tier.close()
            slow_tier.close()

        try:
            links_by_pair = {(link.src, link.dst): link for link in links}
            pairs = [f"{src}->{dst}" for src, dst in links_by_pair]
            assert len(links) == len(links_by_pair) == 2 and (fast_tier.name, slow_tier.name) in links_by_pair, pairs
            assert (slow_tier.name, fast_tier.name) in links_by_pair, pairs
            write_pair = (fast_tier.name, slow_tier.name)
            yield Rig(fast_tier, slow_tier, links_by_pair[write_pair], links_by_pair[write_pair[::-1]])
        except BaseException:
            thread = threading.Thread(target=close, daemon=True)  # A hanging link must not hide the error.
            thread.start()
            thread.join(TIMEOUT_S)
            raise
        close()


@dataclass
class Rig:
    """Two tiers and the links between them."""

    fast_tier: Tier
    slow_tier: Tier
    write_link: Link
    read_link: Link

    def fast_slot(self, nbytes: int, name: str = "block") -> Slot:
        """Return a slot for a copy in the faster tier."""
        slot = self.fast_tier.allocate(nbytes, name=name, home=False)
        assert slot is not None, self.fast_tier.usage()
        return slot

    def slow_slot(self, nbytes: int, name: str = "block") -> Slot:
        """Return a home slot in the slower tier."""
        slot = self.slow_tier.allocate(nbytes, name=name, home=True)
        assert slot is not None, self.slow_tier.usage()
        return slot

    def write(self, slot: Slot, data: torch.Tensor) -> None:
        """Write bytes to a slot in the faster tier, as the holder of a lease would."""
        self.fast_tier.tensor(slot, data.shape, data.dtype).copy_(data)
        if isinstance(self.fast_tier, StreamTier):
            self.fast_tier.record_use([slot])

    def read(self, slot: Slot) -> torch.Tensor:
        """Return the contents of a slot in the faster tier, 1-D uint8 on the CPU."""
        return self.fast_tier.tensor(slot, (slot.nbytes,), torch.uint8).clone().cpu()

    def send(self, fast_slot: Slot, slow_slot: Slot) -> Transfer:
        """Copy a slot to the slower tier and wait for the transfer."""
        transfer = self.write_link.submit(fast_slot, slow_slot, slow_slot.nbytes)
        transfer.wait(TIMEOUT_S)
        return transfer

    def fetch(self, slow_slot: Slot, fast_slot: Slot) -> torch.Tensor:
        """Overwrite a slot in the faster tier with garbage, fetch into this slot, and return the contents."""
        self.write(fast_slot, torch.full((fast_slot.nbytes,), 0xEE, dtype=torch.uint8))
        self.read_link.submit(slow_slot, fast_slot, slow_slot.nbytes).wait(TIMEOUT_S)
        return self.read(fast_slot)


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    """Return random bytes without repeated sections, so that tests can detect misplaced bytes."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def catch_error(action: Callable[[], object]) -> Exception | None:
    """Return the error that a call raises, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None
