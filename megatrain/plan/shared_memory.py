"""A tier whose slots share memory: a step of any model runs in it, on numbers that mean nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tiered.memory.slab import HostSlab
from tiered.tiers.base import Slot, TierUsage
from tiered.tiers.ram import view_as
from tiered.units import PAGE_BYTES, MiB, round_up

if TYPE_CHECKING:
    from megatrain.engine.program import BlockPlan

#: Far more than the caches of a processor hold: what a step comes to has left them since it was there before.
KIND_BYTES = 256 * MiB

_LARGEST_WEIGHT = 0.03  # products of such matrices neither grow from layer to layer nor become denormal numbers


class _Ring(NamedTuple):
    """Blocks of one kind, dtype and size of slot: they take turns on its slabs."""

    kind: str
    dtype: torch.dtype
    slot_bytes: int


class SharedMemoryTier:
    """RAM in which blocks of one kind and size take turns on a few slabs, as many as ``kind_bytes`` allows.

    Where a kind fits, its blocks share nothing. Slabs are those of ``RamTier``. Weights hold small random numbers, all
    else begins as zeros. Every lease is a view of memory that exists, so a step costs what it does at home in RAM.

    Args:
        blocks: what will be registered.
        kind_bytes: about what the blocks of a kind take, but one slab for each size. 0: one slab for each kind, as
            large as its largest block.

    Attributes:
        memory_bytes: what all slabs take.
        capacity_bytes: what all blocks would take.
    """

    alignment_bytes = PAGE_BYTES
    durable = False

    def __init__(self, blocks: Mapping[str, BlockPlan], kind_bytes: int = KIND_BYTES, *, name: str = "ram") -> None:
        self.name = name
        self.device: torch.device | None = torch.device("cpu")
        self.capacity_bytes = sum(self.slot_bytes(block.nbytes) for block in blocks.values())
        self._used_bytes = 0
        counts = _slab_counts(blocks, kind_bytes)
        self._slabs: dict[_Ring, list[HostSlab]] = {}
        try:
            for ring, count in counts.items():
                self._slabs[ring] = []
                for _ in range(count):
                    self._slabs[ring].append(_filled(ring))
        except BaseException:
            self.close()
            raise
        self._places: dict[str, HostSlab] = {}
        turns = Counter[_Ring]()
        for block in blocks.values():
            ring = _ring_of(block, counts)
            self._places[block.key] = self._slabs[ring][turns[ring] % counts[ring]]
            turns[ring] += 1

    @property
    def memory_bytes(self) -> int:
        """Return what all slabs take."""
        return sum(slab.nbytes for slabs in self._slabs.values() for slab in slabs)

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to a page."""
        return round_up(nbytes, PAGE_BYTES)

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return the place of a block (resource: a uint8 tensor)."""
        self._used_bytes += self.slot_bytes(nbytes)
        return Slot(self.name, nbytes, self.slot_bytes(nbytes), self._places[name].tensor)

    def free(self, slot: Slot) -> None:
        """Take the place back; its memory goes with the tier."""
        self._used_bytes -= slot.slot_bytes
        slot.resource = None

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the slot."""
        assert isinstance(slot.resource, torch.Tensor), slot
        return view_as(slot.resource, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        """Do nothing: what a step takes besides its blocks is not kept account of here."""

    def sync(self) -> None:
        """Do nothing: host memory does not survive the process."""

    def usage(self) -> TierUsage:
        """Return the bytes of the slots, each counted as if it had memory of its own."""
        return TierUsage(self.capacity_bytes, self._used_bytes, self._used_bytes)

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left."""
        self._places = {}
        slabs, self._slabs = self._slabs, {}
        for slab in (slab for ring in slabs.values() for slab in ring):
            slab.close()


def shared_bytes(blocks: Mapping[str, BlockPlan], kind_bytes: int) -> int:
    """Return what the slabs of a tier for these blocks would take."""
    return sum(ring.slot_bytes * count for ring, count in _slab_counts(blocks, kind_bytes).items())


def _slab_counts(blocks: Mapping[str, BlockPlan], kind_bytes: int) -> dict[_Ring, int]:
    rings = Counter(_own_ring(block) for block in blocks.values())
    if not kind_bytes:
        largest: dict[tuple[str, torch.dtype], int] = {}
        for ring in rings:
            largest[ring[:2]] = max(largest.get(ring[:2], 0), ring.slot_bytes)
        return {_Ring(*kind, nbytes): 1 for kind, nbytes in largest.items()}
    totals = Counter[tuple[str, torch.dtype]]()
    for ring, count in rings.items():
        totals[ring[:2]] += ring.slot_bytes * count
    shares = {ring: min(1.0, kind_bytes / max(1, totals[ring[:2]])) for ring in rings}
    return {ring: max(1, int(count * shares[ring])) for ring, count in rings.items()}


def _ring_of(block: BlockPlan, counts: Mapping[_Ring, int]) -> _Ring:
    own = _own_ring(block)
    return own if own in counts else next(ring for ring in counts if ring[:2] == own[:2])


def _own_ring(block: BlockPlan) -> _Ring:
    kind = block.key.rsplit("/", 1)[-1] if block.kind == "optimizer" else block.kind
    return _Ring(kind, block.dtype, round_up(block.nbytes, PAGE_BYTES))


def _filled(ring: _Ring) -> HostSlab:
    slab = HostSlab(ring.slot_bytes)
    if ring.kind == "weights" and ring.slot_bytes:
        slab.tensor.view(ring.dtype).uniform_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT)
    return slab
