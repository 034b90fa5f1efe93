"""Access to blocks by name, for programs that want copies of tensors or rows instead of leases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from tiered.block import BlockSpec, CopyState
from tiered.durable.arrays import check_pieces, page_aligned, read_piece, read_range
from tiered.errors import CapacityError, TransferError, UninitializedBlockError
from tiered.file_io import PIECE_BYTES, Digest, opened
from tiered.leasing import Leasing
from tiered.links.files import explain
from tiered.movement import Movement
from tiered.records import Block, Lease
from tiered.schedule import Access, Mode, Schedule
from tiered.tiers.layout import HomeFiles, parts_of
from tiered.tiers.nvme import NvmeTier
from tiered.units import PAGE_BYTES, round_up


class NamedAccess:
    """Reader and writer of blocks and rows by name, through leases or directly from files."""

    def __init__(self, movement: Movement, leasing: Leasing) -> None:
        self._movement, self._leasing = movement, leasing

    def default_home(self) -> str:
        """Return the name of the slowest writable tier."""
        return self._movement.slowest_writable

    def write(self, spec: BlockSpec, tensor: torch.Tensor, start: int | None) -> None:
        """Write a whole block, or ``len(tensor)`` rows from row ``start``, through a lease in an addressable tier."""
        tier = self._slowest_valid_tier(spec.key) or self._movement.nearest_addressable(spec.home)
        if start is None:
            with self._leasing.acquire(spec.key, tier, "w") as lease:
                lease.tensor.copy_(tensor)
            return
        stop = start + len(tensor)
        if not spec.shape or not 0 <= start <= stop <= spec.shape[0]:
            raise ValueError(_rows_error_text(spec, start, stop))
        if tensor.shape[1:] != spec.shape[1:] or tensor.dtype != spec.dtype:
            description = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"block '{spec.key}' has rows of {spec.shape[1:]} of {spec.dtype}, not {description}")
        with self._leasing.acquire(spec.key, tier, "rw") as lease:
            lease.tensor[start:stop].copy_(tensor)

    def read(self, spec: BlockSpec) -> torch.Tensor:
        """Return a whole block as a CPU tensor. If the nearest addressable tier has space, a copy also stays there."""
        tier = self._slowest_valid_tier(spec.key) or self._movement.nearest_addressable(spec.home)
        try:
            with self._leasing.acquire(spec.key, tier, "r") as lease:
                return lease.tensor.to("cpu", copy=True)
        except CapacityError:
            data = self._read_files(spec, 0, spec.nbytes)
            if data is None:
                raise
            return data.view(spec.dtype).view(spec.shape)

    def read_rows(self, spec: BlockSpec, start: int, stop: int) -> torch.Tensor:
        """Return rows [``start``, ``stop``) of a block as a CPU tensor."""
        if not spec.shape or not 0 <= start <= stop <= spec.shape[0]:
            raise ValueError(_rows_error_text(spec, start, stop))
        tier = self._slowest_valid_tier(spec.key)
        if tier is None:
            row_bytes = spec.nbytes // max(1, spec.shape[0])
            data = self._read_files(spec, start * row_bytes, stop * row_bytes)
            if data is not None:
                return data.view(spec.dtype).view(stop - start, *spec.shape[1:])
        with self._leasing.acquire(spec.key, tier or self._movement.nearest_addressable(spec.home), "r") as lease:
            return lease.tensor[start:stop].to("cpu", copy=True)

    def stream(self, keys: Sequence[str], tier: str, mode: Mode) -> Iterator[Lease]:
        """Yield leases one at a time; see ``TieredStore.stream``."""
        movement = self._movement
        with movement.changed:
            self._leasing.check_open()
            current_schedule = movement.prefetcher.schedule
            if current_schedule is not None:
                raise ValueError("this store already prefetches by a schedule (set_schedule), so it cannot stream")
            for key in keys:
                self._leasing.block(key)
            self._leasing.tier(tier)
            first_tick = movement.prefetcher.tick + 1
            schedule = Schedule(Access(first_tick + index, key, tier, mode) for index, key in enumerate(keys))
            movement.prefetcher.set_schedule(schedule, None)
            movement.prefetcher.pump()
        try:
            for index, key in enumerate(keys):
                with movement.changed:
                    movement.prefetcher.tick = first_tick + index
                    movement.prefetcher.pump()
                with self._leasing.acquire(key, tier, mode) as lease:
                    yield lease
        finally:
            with movement.changed:
                if movement.prefetcher.schedule is schedule:
                    movement.prefetcher.set_schedule(None, 0)

    def _slowest_valid_tier(self, key: str) -> str | None:
        """Return the slowest addressable tier with a block's newest bytes, or None if no addressable tier has them."""
        movement = self._movement
        with movement.changed:
            block = self._leasing.block(key)
            for name in reversed(movement.order):
                copy = block.copies.get(name)
                if copy is not None and copy.state.is_valid and movement.tiers[name].device is not None:
                    return name
        return None

    def _read_files(self, spec: BlockSpec, start: int, stop: int) -> torch.Tensor | None:
        """Read bytes of a block from its files, as 1-D uint8. Return None if it has no files or they are stale."""
        movement = self._movement
        with movement.changed:
            block: Block = self._leasing.block(spec.key)
            if not block.has_contents and block.writer is None:
                raise UninitializedBlockError(spec.key)
            slot, tier = block.home.slot, movement.tiers[spec.home]
            is_current = block.home.state is CopyState.CLEAN and block.writer is None
            if not is_current or slot is None or not isinstance(slot.resource, HomeFiles):
                return None
            home = slot.resource
            block.home.readers += 1  # The reader count keeps other callers from changing or freeing the files.
        try:
            is_checked = isinstance(tier, NvmeTier) and tier.verify == "always" and home.checksums is not None
            return _read_checked(home, spec, start, stop) if is_checked else _read_unchecked(home, spec, start, stop)
        finally:
            with movement.changed:
                block.home.readers -= 1
                movement.changed.notify_all()


def _read_unchecked(home: HomeFiles, spec: BlockSpec, start: int, stop: int) -> torch.Tensor:
    """Return bytes ``start`` to ``stop`` of a block without comparing checksums. Reads whole pages."""
    base, limit = start // PAGE_BYTES * PAGE_BYTES, round_up(stop, PAGE_BYTES)
    pages = page_aligned(limit - base)
    for path, begin, end, pos in parts_of(home.files, base, limit):
        try:
            with opened(path, os.O_RDONLY) as fd:
                nbytes = read_range(fd, begin, end - begin, pages[pos - base : pos - base + end - begin], Digest())
        except OSError as cause:
            text = f"read failed: {explain(cause)}"
            raise TransferError(text, tier=spec.home, path=str(path), errno=cause.errno, offset=begin) from cause
        if nbytes < end - begin:
            text = f"file is truncated: it ends {end - begin - nbytes} bytes before the block does"
            raise TransferError(text, tier=spec.home, path=str(path), offset=begin + nbytes)
    return pages[start - base : stop - base]


def _read_checked(home: HomeFiles, spec: BlockSpec, start: int, stop: int) -> torch.Tensor:
    """Return bytes ``start`` to ``stop`` of a block. Reads whole 16 MiB pieces and compares their checksums."""
    assert home.checksums is not None, home.key
    base, limit = start // PIECE_BYTES * PIECE_BYTES, min(round_up(stop, PIECE_BYTES), spec.nbytes)
    data = page_aligned(limit - base)
    checksums = list(home.checksums)
    for begin in range(base, limit, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, limit)
        checksums[begin // PIECE_BYTES] = read_piece(home.files, spec, (begin, end), data[begin - base : end - base])
    check_pieces(home.key, home.files, spec.nbytes, home.checksums, checksums)
    return data[start - base : stop - base]


def _rows_error_text(spec: BlockSpec, start: int, stop: int) -> str:
    if not spec.shape:
        return f"block '{spec.key}' is a scalar: it has no rows"
    return f"block '{spec.key}' has {spec.shape[0]} rows: rows {start} to {stop} are out of range"
