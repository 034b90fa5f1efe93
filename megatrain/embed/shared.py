"""Offloaded modules of several ranks: each has a shard of every block, and they move weights and gradients by turns.

The law of shards, the order of additions and the collectives are those of a run of several processes
(``megatrain.ranks``). There a program says which collective comes next; here the user's code decides, so every
collective is announced to all ranks first: where they are not about to do the same, all of them raise the same error,
and none waits for another.

Bytes move between host memories. Where modules compute on a GPU, a full copy is gathered in RAM and copied to the GPU,
and sums of gradients, which are made there, are fetched to RAM for their exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_128_digest

from megatrain.api import Collectives, RankLanes, RanksDifferError, RankShards, check_same
from megatrain.base.layout import UnitLayout
from megatrain.embed.stores import compute_device, compute_tier
from megatrain.ranks.lanes import lanes_of_rank, total

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tiered import TieredStore

_FP32_BYTES = 4


class ModuleRanks:
    """The ranks that an offloaded module is shared by, seen from one of them. Used by one thread at a time.

    Args:
        group: a process group of torch.distributed, over host memory (gloo).
        store: this rank's.
        num_lanes: that gradients are added in, a multiple of the ranks; None: one for each.

    Attributes:
        shards: which elements of a block this rank has.
        lane: the one of this rank's that gradients are added to now.

    Raises:
        ValueError: lanes that ranks cannot share evenly, or a group without gloo.
    """

    def __init__(self, group: ProcessGroup, store: TieredStore, num_lanes: int | None) -> None:
        self._collectives = Collectives(group)
        if not self._collectives.serves("cpu"):
            raise ValueError(
                "group=... has no backend for host memory: make it with gloo, or the default group with "
                'init_process_group("cpu:gloo,cuda:nccl")'
            )
        self._store, self.tier, self.device = store, compute_tier(store), compute_device(store)
        self.rank, self.size = self._collectives.rank, self._collectives.size
        count = self.size if num_lanes is None else num_lanes
        if count < 1 or count % self.size:  # all ranks gather for as many forwards and backwards
            raise ValueError(
                f"gradient_lanes={count} for {self.size} ranks: all have as many lanes, so give a multiple of that"
            )
        self.shards, self.lanes = RankShards(self.rank, self.size), RankLanes(count, self.size)
        self.own_lanes = lanes_of_rank(self.rank, self.size, count)
        self.lane = self.own_lanes[0]
        self._in_use_bytes, self._reserved_bytes = Counter[str](), Counter[str]()  # by tier
        self._num_announced = 0

    def all_or_none(self, action: Callable[[], None]) -> None:
        """Do something on all ranks that may be refused: then it is on all of them; see ``Collectives.all_or_none``."""
        self._collectives.all_or_none(action)

    def announce(self, what: str) -> None:
        """Tell all ranks what this one is about to do with them.

        Raises:
            RanksDifferError: others are about to do something else. On all ranks; nothing was done.
        """
        self._num_announced += 1
        own = torch.frombuffer(bytearray(xxh3_128_digest(f"{self._num_announced} {what}".encode())), dtype=torch.uint8)
        found = torch.empty(self.size * len(own), dtype=torch.uint8)
        self._collectives.gather(found, own)
        rows = found.view(self.size, -1)
        if bool((rows == rows[0]).all()):
            return
        texts = self._collectives.gather_objects((self._num_announced, what))
        other = next(rank for rank, each in enumerate(texts) if each != texts[0])
        raise RanksDifferError(
            f"the ranks of an offloaded module do different things: rank 0 comes to {_said(texts[0])}, rank {other} to "
            f"{_said(texts[other])}. Each rank must use the same modules in the same order, in forward and backward, "
            "and call step(), state_dict() and gathered() as the others do: give a rank without data a batch without "
            "labels (loss * 0), and leave out modules on all ranks or on none"
        )

    def gather_objects(self, item: object) -> list[Any]:
        """Return what every rank gave, by rank. After an announcement."""
        return self._collectives.gather_objects(item)

    # -- what is where -----------------------------------------------------------------------------------------

    def num_elements(self, layout: UnitLayout) -> int:
        """Return the length of a shard of a layout: the same on all ranks."""
        return self.shards.num_elements(range(layout.num_elements))

    def num_gathered(self, layout: UnitLayout) -> int:
        """Return the length of all shards of a layout, one after the other."""
        return self.size * self.num_elements(layout)

    def owned(self, layout: UnitLayout) -> range:
        """Return the elements of a layout that this rank has."""
        return self.shards.owned(range(layout.num_elements))

    def put_shard(self, shard: Tensor, layout: UnitLayout, full: Tensor) -> None:
        """Copy what this rank has of a layout's elements; zeros lie past its end."""
        owned = self.owned(layout)
        shard[: len(owned)].copy_(full[owned.start : owned.stop])
        shard[len(owned) :].zero_()

    def stored_bytes(self, layout: UnitLayout, dtype: torch.dtype) -> int:
        """Return the size of a shard."""
        return self.num_elements(layout) * dtype.itemsize

    def gathered_bytes(self, layout: UnitLayout, dtype: torch.dtype) -> int:
        """Return the size of a full copy, which is that of a sum of gradients as well."""
        return self.num_gathered(layout) * dtype.itemsize

    # -- memory that is no block -------------------------------------------------------------------------------

    def reserve(self, tier: str, nbytes: int) -> None:
        """Set room apart for full copies and sums that are on their way.

        Raises:
            CapacityError: there is none.
        """
        more = nbytes - self._reserved_bytes[tier]
        if more > 0:
            self._store.reserve(tier, more)
            self._reserved_bytes[tier] += more

    def reserved_bytes(self, tier: str) -> int:
        """Return the room of a tier that is set apart."""
        return self._reserved_bytes[tier]

    def unreserve(self) -> None:
        """Give back all room that was set apart."""
        for tier, nbytes in self._reserved_bytes.items():
            self._store.reserve(tier, -nbytes)
        self._reserved_bytes.clear()

    def take(self, tier: str, nbytes: int) -> None:
        """Count memory that is about to be used; more than was reserved is reserved now.

        Raises:
            CapacityError: there is none.
        """
        self.reserve(tier, self._in_use_bytes[tier] + nbytes)
        self._in_use_bytes[tier] += nbytes

    def give(self, tier: str, nbytes: int) -> None:
        """Undo a ``take``."""
        self._in_use_bytes[tier] -= nbytes

    @contextmanager
    def room(self, tier: str, nbytes: int) -> Iterator[None]:
        """Count memory that is used inside the context.

        Raises:
            CapacityError: there is none.
        """
        self.take(tier, nbytes)
        try:
            yield
        finally:
            self.give(tier, nbytes)

    def exchange_bytes(self, layout: UnitLayout) -> int:
        """Return the memory that an exchange of gradients of a layout takes."""
        return self.lanes.num_sums * self.num_elements(layout) * _FP32_BYTES

    # -- collectives -------------------------------------------------------------------------------------------

    def gather(self, full: Tensor, shard: Tensor) -> None:
        """Write the shards of all ranks into ``full``, one after the other."""
        self._collectives.gather(full, shard)

    def add_up(self, sums: Mapping[int, Tensor]) -> Tensor:
        """Return this rank's shard of the sum over all lanes of all ranks: the same bits for any number of ranks.

        Args:
            sums: by own lane: all shards of its sum, one after the other. Written.
        """
        own = {(lane, lane + 1): tensor for lane, tensor in sums.items()}
        of_ranks = [self.lanes.sums_of_rank(rank) for rank in range(self.size)]
        mine = [total(first, stop, own, Tensor.add_) for first, stop in of_ranks[self.rank]]
        length = mine[0].numel() // self.size
        received = torch.empty(self.lanes.num_sums * length, dtype=torch.float32)
        found: dict[tuple[int, int], Tensor] = {}
        start = 0
        for number in range(max(map(len, of_ranks))):
            lengths = [length * (number < len(ranges)) for ranges in of_ranks]
            stop = start + sum(lengths)
            has_one = number < len(mine)
            sent = mine[number] if has_one else received[:0]
            self._collectives.exchange(received[start:stop], sent, lengths, [length * has_one] * self.size)
            rows = iter(received[start:stop].view(-1, length))
            found.update((ranges[number], next(rows)) for ranges in of_ranks if number < len(ranges))
            start = stop
        return total(0, self.lanes.count, found, Tensor.add_)


class UnshardedBlock:
    """A full copy of a weight block, made from the shards of all ranks; stands where a lease of a whole block does.

    Attributes:
        tensor: [elements of the layout].
        mode: "r", "rw", or "w" where there is nothing to read yet.
    """

    def __init__(
        self, ranks: ModuleRanks, store: TieredStore, key: str, layout: UnitLayout, dtype: torch.dtype, mode: str
    ) -> None:
        ranks.announce(f"the weights of {key}" + (" to change them" if mode != "r" else ""))
        self._ranks, self._store, self._key, self._layout, self.mode = ranks, store, key, layout, mode
        self._nbytes = ranks.gathered_bytes(layout, dtype)
        ranks.take(ranks.tier, self._nbytes)
        try:
            self.tensor = self._gathered(dtype)[: layout.num_elements]
        except BaseException:
            ranks.give(ranks.tier, self._nbytes)
            raise

    def _gathered(self, dtype: torch.dtype) -> Tensor:
        ranks, count = self._ranks, self._ranks.num_gathered(self._layout)
        if self.mode == "w":
            return torch.zeros(count, dtype=dtype, device=ranks.device)
        with ranks.room("ram", 0 if ranks.tier == "ram" else self._nbytes):
            full = torch.empty(count, dtype=dtype)
            with self._store.acquire(self._key, "ram", "r") as lease:
                ranks.gather(full, lease.tensor)
            return full.to(ranks.device)  # not page-locked: the copy has ended when the call returns

    def release(self) -> None:
        """Drop the copy; this rank's shard of what was changed goes to the store."""
        if self.mode != "r":
            with torch.no_grad(), self._store.acquire(self._key, "ram", "w") as lease:
                self._ranks.put_shard(lease.tensor, self._layout, self.tensor)
        self.abandon()

    def abandon(self) -> None:
        """Drop the copy, and whatever was changed."""
        self._ranks.give(self._ranks.tier, self._nbytes)


@contextmanager
def filled_in(
    store: TieredStore, key: str, layout: UnitLayout, dtype: torch.dtype, ranks: ModuleRanks | None
) -> Iterator[Tensor]:
    """Yield zeros, as long as a layout; what is written there becomes the block, or this rank's shard of it."""
    with torch.no_grad(), store.acquire(key, "ram", "w") as lease:
        if ranks is None:
            lease.tensor.zero_()
            yield lease.tensor
            return
        with ranks.room("ram", layout.num_elements * dtype.itemsize):
            full = torch.zeros(layout.num_elements, dtype=dtype)
            yield full
            ranks.put_shard(lease.tensor, layout, full)


def check_same_module(ranks: ModuleRanks, model: nn.Module, layouts: Sequence[UnitLayout]) -> None:
    """Refuse a module that is not the same on all ranks: shards of different ones would be mixed.

    Raises:
        RanksDifferError: names the first difference.
    """
    parts = {"gradient_lanes": str(ranks.lanes.count)}
    parts |= {f"the layout of {layout.name}": str(layout.entries) for layout in layouts}
    for name, parameter in model.named_parameters():
        is_here = parameter.device.type != "meta"
        numbers = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data if is_here else b""
        parts[name] = f"{parameter.dtype}, {parameter.requires_grad}, {xxh3_128_digest(numbers).hex()}"
    check_same(ranks.gather_objects, "offloaded module", parts)


def _said(announced: tuple[int, str]) -> str:
    return f"{announced[1]} as number {announced[0]}"
