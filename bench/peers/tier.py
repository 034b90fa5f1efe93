"""The tier's side in `links.py`: blocks of a store, read from NVMe into RAM slots and written back."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import tiered
from bench.peers.base import MIXED, READ, Sample, Side, SkippedError, Work, fill_randomly, timed
from tiered import Transfer
from tiered.units import MiB

VERIFY_MODES = ("off", "resume", "always")


class TierSide(Side):
    """Side that moves the blocks of a store, all of which fit in RAM.

    Between measurements, the RAM tier holds no copies, and no transfers run.

    A read ends when every block has been leased in RAM, with its bytes checked as ``verify`` requires. A write starts
    with dirty copies and ends after ``NvmeTier.sync``.

    Attributes:
        num_wrong: Number of reads in which a block's first element was not the last number written to it.
    """

    def __init__(self, work: Work, verify: str) -> None:
        self.name = f"tier_{verify}"
        options: dict[str, Any] = {}
        if "verify" in inspect.signature(tiered.NvmeTier.__init__).parameters:
            options["verify"] = verify
        elif verify != "off":
            raise SkippedError("NvmeTier has no option 'verify' in this version")
        self.num_wrong = 0
        self._work = work
        self._written = 0
        self._stamps: dict[str, int] = {}
        self._ram = tiered.RamTier(work.nbytes + 2 * MiB)
        self._nvme = tiered.NvmeTier([work.folder / self.name], work.nbytes, **options)
        self._store = tiered.TieredStore([self._ram, self._nvme])
        self._keys = [f"blocks/{number}" for number in range(work.num_blocks)]
        try:
            self._fill()
        except BaseException:
            self._store.close()
            raise

    def _fill(self) -> None:
        num_elements = self._work.block_nbytes // 4
        for key in self._keys:
            self._store.register(key, (num_elements,), torch.int32, home="nvme")
            with self._store.acquire(key, "ram", "w") as lease:
                fill_randomly(lease.tensor)
            self._stamp(key)
        self._settle()

    @property
    def io_path(self) -> str:
        """Return the data path of reads and writes, e.g. ``posix-direct``."""
        return self._nvme.io_path

    @property
    def huge_page_bytes(self) -> int:
        """Return the bytes of RAM slots that are on huge pages."""
        return self._ram.huge_page_bytes

    def measure(self, operation: str) -> Sample:
        """Read all blocks, write all blocks, or read the first half while the second half is written."""
        reading, writing = self._work.halves
        if operation != MIXED:
            everything = range(self._work.num_blocks)
            reading, writing = (everything, range(0)) if operation == READ else (range(0), everything)
        to_read, to_write = [self._keys[i] for i in reading], [self._keys[i] for i in writing]
        for key in to_write:
            self._stamp(key)
        with timed() as sample:
            self._move(to_read, to_write)
        for key in to_read:
            with self._store.acquire(key, "ram") as lease:
                self.num_wrong += int(lease.tensor[0].item() != self._stamps[key])
        self._settle()
        return sample

    def _move(self, to_read: list[str], to_write: list[str]) -> None:
        writes: list[Transfer] = []
        for number in range(max(len(to_read), len(to_write))):
            if number < len(to_read):
                self._store.prefetch(to_read[number], "ram")
            if number < len(to_write):
                writes.append(self._store.evict(to_write[number], "ram"))
        for key in to_read:
            self._store.acquire(key, "ram").release()
        for write in writes:
            write.wait()
        if to_write:
            self._nvme.sync()

    def _stamp(self, key: str) -> None:
        """Make a block's copy in RAM dirty: set its first element to a number that no earlier version had."""
        self._written += 1
        with self._store.acquire(key, "ram", "w") as lease:
            lease.tensor[0] = self._written
        self._stamps[key] = self._written

    def _settle(self) -> None:
        for key in self._keys:
            self._store.evict(key, "ram")
        self._store.wait_idle()

    def close(self) -> None:
        self._store.close()
