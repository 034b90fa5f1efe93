"""Offloaded modules that several ranks share. Each rank stores a shard of every block.

Shards, order of additions and collectives are the same as in a multi-process run (``megatrain.ranks``). In such a run,
the program defines the next collective. Here the user's code defines it, so each rank first announces its next
collective to all ranks. If the announcements differ, all ranks raise the same error instead of waiting for each other.

Collectives move bytes between host memories. If modules compute on a GPU, full copies are gathered in RAM and then
copied to the GPU. Gradients are summed on the GPU and copied to RAM for their exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_128_digest

from megatrain.base.layout import TensorEntry, UnitLayout
from megatrain.embed.block_homes import compute_device, free_home_bytes, shared_state
from megatrain.embed.gradient_block import GradientBlock
from megatrain.embed.groups import StateGroup
from megatrain.embed.partition import OffloadError, Part, UnitPart, enclosing_parts, parts_of
from megatrain.embed.room import UPDATE_BYTES, Homes, LocalBlocks, WeightLease
from megatrain.embed.state_blocks import LayoutShard
from megatrain.embed.weights import WeightInUseError
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.optim.base import StateKind
from megatrain.optim.clip import add_in_order, partial_squares
from megatrain.optim.threads import KernelThreads
from megatrain.ranks.collectives import Collectives, RanksDifferError, check_same
from megatrain.ranks.lanes import rank_lanes, total
from megatrain.ranks.shards import RankLanes, RankShards
from tiered import Mode, TieredStore
from tiered.errors import CapacityError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ModuleRanks(LocalBlocks):
    """One rank's access to an offloaded module that several ranks share. Used by one thread at a time.

    Each rank stores a shard of every block. Shards are gathered in RAM, even if modules compute on a GPU.

    Args:
        group: Process group of torch.distributed over host memory (gloo).
        num_lanes: Number of gradient lanes, a multiple of the number of ranks; None for one lane per rank.

    Attributes:
        collectives: Collectives of the group. Call ``announce`` before each of them.
        shards: Mapping of block elements to ranks.
        lane: Lane of this rank that currently receives gradients.

    Raises:
        ValueError: ``num_lanes`` is not a multiple of the number of ranks, or the group has no gloo backend.
    """

    def __init__(self, group: ProcessGroup, store: TieredStore, num_lanes: int | None) -> None:
        self.collectives = Collectives(group)
        if not self.collectives.supports_device("cpu"):
            raise ValueError(
                "group=... has no backend for host memory. Create it with gloo, or create the default group with "
                'init_process_group("cpu:gloo,cuda:nccl")'
            )
        super().__init__(store)
        self.compute_tier, self.device = self.tier, compute_device(store)
        self.tier = "ram"
        self.rank, self.size = self.collectives.rank, self.collectives.size
        count = self.size if num_lanes is None else num_lanes
        if count < 1 or count % self.size:  # all ranks must run the same number of forwards and backwards
            raise ValueError(f"gradient_lanes={count} for {self.size} ranks: pass a multiple of the number of ranks")
        self.shards, self.lanes = RankShards(self.rank, self.size), RankLanes(count, self.size)
        self.own_lanes = rank_lanes(self.rank, self.size, count)
        self.lane = self.own_lanes[0]
        self._in_use_bytes, self._reserved_bytes = Counter[str](), Counter[str]()  # by tier
        self._num_announced = 0

    def announce(self, operation: str) -> None:
        """Announce this rank's next collective. All ranks raise ``RanksDifferError`` if their announcements differ."""
        self._num_announced += 1
        digest = xxh3_128_digest(f"{self._num_announced} {operation}".encode())
        message = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        messages = torch.empty(self.size * len(message), dtype=torch.uint8)
        self.collectives.gather(messages, message)
        rows = messages.view(self.size, -1)
        if bool((rows == rows[0]).all()):
            return
        calls = self.collectives.gather_objects((self._num_announced, operation))
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        raise RanksDifferError(
            f"the ranks of an offloaded module do different things: rank 0 comes to {_text(calls[0])}, rank {other} to "
            f"{_text(calls[other])}. All ranks must use the same modules in the same order, in forward and backward, "
            "and must all call step(), state_dict() and gathered(). Give a rank without data a batch without labels "
            "(loss * 0), and skip modules either on all ranks or on none"
        )

    def num_elements(self, layout: UnitLayout) -> int:
        """Return the number of elements in each rank's shard of a layout, which includes padding."""
        return self.shards.num_elements(range(layout.num_elements))

    def num_gathered_elements(self, layout: UnitLayout) -> int:
        """Return the total number of elements in the shards of all ranks, including padding."""
        return self.size * self.num_elements(layout)

    def owned_range(self, layout: UnitLayout) -> range:
        """Return the range of a layout's elements that this rank owns."""
        return self.shards.owned_range(range(layout.num_elements))

    def shard(self, layout: UnitLayout, kinds: Iterable[StateKind]) -> LayoutShard:
        """Return this rank's shard of a layout. Raise ``ValueError`` if a kind of state cannot be sharded."""
        if any(kind.needs_whole for kind in kinds):
            raise ValueError(
                f"this optimizer needs whole matrices, but {layout.name} is shared by {self.size} ranks. Use "
                "TieredAdamW, TieredLion or TieredSGD"
            )
        return LayoutShard(self.rank, self.size, self.owned_range(layout), self.num_elements(layout))

    def write_shard(self, shard: Tensor, layout: UnitLayout, full_copy: Tensor) -> None:
        """Copy this rank's elements from a full copy to the shard. Fill the rest of the shard with zeros."""
        owned = self.owned_range(layout)
        shard[: len(owned)].copy_(full_copy[owned.start : owned.stop])
        shard[len(owned) :].zero_()

    def gathered_bytes(self, layout: UnitLayout, dtype: torch.dtype) -> int:
        """Return the bytes of a full copy with this dtype, including padding. A gradient sum has the same length."""
        return self.num_gathered_elements(layout) * dtype.itemsize

    def reserve(self, tier: str, nbytes: int) -> None:
        """Reserve at least ``nbytes`` in a tier outside of blocks. Raise ``CapacityError`` if the tier is full."""
        extra_bytes = nbytes - self._reserved_bytes[tier]
        if extra_bytes > 0:
            self.store.reserve(tier, extra_bytes)
            self._reserved_bytes[tier] += extra_bytes

    def release_reserved(self) -> None:
        """Release all reserved memory."""
        for tier, nbytes in self._reserved_bytes.items():
            self.store.reserve(tier, -nbytes)
        self._reserved_bytes.clear()

    @contextmanager
    def use_memory(self, tier: str, nbytes: int) -> Iterator[None]:
        """Count memory as used inside the context. Raise ``CapacityError`` if the tier has no space for it."""
        self.reserve(tier, self._in_use_bytes[tier] + nbytes)
        self._in_use_bytes[tier] += nbytes
        try:
            yield
        finally:
            self._in_use_bytes[tier] -= nbytes

    def exchange_bytes(self, layout: UnitLayout) -> int:
        """Return the bytes that a gradient exchange needs to receive shards of a layout."""
        return self.lanes.num_sums * self.num_elements(layout) * torch.float32.itemsize

    def sum_lanes(self, sums: Mapping[int, Tensor]) -> Tensor:
        """Return this rank's shard of the sum over all lanes. The sum is bit-identical for any number of ranks.

        Args:
            sums: This rank's sums, by lane. Each contains the concatenated shards of all ranks, and is overwritten.
        """
        lane_sums = {(lane, lane + 1): tensor for lane, tensor in sums.items()}
        rank_ranges = [self.lanes.rank_sums(rank) for rank in range(self.size)]
        own_sums = [total(first, stop, lane_sums, Tensor.add_) for first, stop in rank_ranges[self.rank]]
        length = own_sums[0].numel() // self.size
        received = torch.empty(self.lanes.num_sums * length, dtype=torch.float32)
        range_sums: dict[tuple[int, int], Tensor] = {}
        start = 0
        for index in range(max(map(len, rank_ranges))):
            lengths = [length * (index < len(ranges)) for ranges in rank_ranges]
            stop = start + sum(lengths)
            is_sender = index < len(own_sums)
            payload = own_sums[index] if is_sender else received[:0]
            self.collectives.exchange(received[start:stop], payload, lengths, [length * is_sender] * self.size)
            rows = iter(received[start:stop].view(-1, length))
            range_sums.update((ranges[index], next(rows)) for ranges in rank_ranges if index < len(ranges))
            start = stop
        return total(0, self.lanes.count, range_sums, Tensor.add_)

    def lease(self, part: Part, mode: Mode) -> WeightLease:
        """Return a full copy of a part's weights, gathered from all ranks. This is a collective."""
        return UnshardedBlock(self, part, mode)

    @contextmanager
    def new_contents(self, part: Part) -> Iterator[Tensor]:
        """Yield a flat tensor of zeros. On exit, this rank's shard of the tensor becomes the block's contents."""
        with (
            torch.no_grad(),
            self.store.acquire(part.weight_key, "ram", "w") as lease,
            self.use_memory("ram", part.weight_bytes),
        ):
            full_copy = torch.zeros(part.layout.num_elements, dtype=part.dtype)
            yield full_copy
            self.write_shard(lease.tensor, part.layout, full_copy)

    def is_copy(self, home: str) -> bool:
        """Return True, because a full copy is never stored in the home."""
        return True

    def evict_copy(self, part: Part) -> None:
        """Do nothing, because releasing the lease has already dropped the full copy."""

    def gradient_elements(self, part: Part) -> Mapping[str, int]:
        """Return the lengths of the gradient blocks by key: this rank's shard of the total, and each lane's sum."""
        lanes = {lane_key(part.gradient_key, lane): self.num_gathered_elements(part.layout) for lane in self.own_lanes}
        return {part.gradient_key: self.num_elements(part.layout), **lanes}

    def gradient_block(self, part: Part) -> GradientBlock:
        """Return an object that keeps one sum of a part's gradients per lane of this rank."""
        return SharedGradients(self, part)

    def check_module(self, model: nn.Module, units: Sequence[UnitPart], find_homes: Callable[[], Homes]) -> Homes:
        """Return this rank's homes. Raise an error on all ranks if the module differs or does not fit on one of them.

        Raises:
            OffloadError: A trained parameter is outside of the store.
            RanksDifferError: The module differs between ranks. The message contains the first difference.
        """
        parts = parts_of(units)
        _check_trained_parameters(model, parts)
        with shared_state(self.store).working_room():
            try:
                homes = self.collectives.run_on_all(find_homes)
                check_same_module(self, model, [part.layout for part in parts])
            except BaseException:  # another rank may have failed, although the module fits on this rank
                self.release_reserved()
                raise
        return homes

    def working_bytes(self, units: Sequence[UnitPart]) -> int:
        """Return the RAM in bytes for updating the largest shard, or for the sums of one exchange if that is more."""
        max_bytes = 0
        for part in parts_of(units):
            sum_bytes = len(self.own_lanes) * self.gathered_bytes(part.layout, torch.float32)
            max_bytes = max(max_bytes, UPDATE_BYTES * self.num_elements(part.layout), sum_bytes)
        return max_bytes

    def reserve_memory(self, units: Sequence[UnitPart]) -> None:
        """Reserve memory outside of blocks. Raise ``CapacityError`` if a tier is too small.

        The compute tier needs space for the full copies of a unit and its enclosing modules. RAM needs space for the
        shards received in an exchange and, if a GPU computes, for gathering a full copy.
        """
        computes_in_ram = self.compute_tier == "ram"
        copies = scratch_bytes = 0
        for unit in units:
            parts = enclosing_parts(unit, units)
            copies = max(copies, sum(self.gathered_bytes(part.layout, part.dtype) for part in parts))
            for part in parts:
                staged_bytes = 0 if computes_in_ram else self.gathered_bytes(part.layout, part.dtype)
                scratch_bytes = max(scratch_bytes, self.exchange_bytes(part.layout), staged_bytes)
        self.reserve("ram", max(copies, scratch_bytes) if computes_in_ram else scratch_bytes)
        if not computes_in_ram:
            self.reserve(self.compute_tier, copies)

    def check_working_set(self, units: Sequence[UnitPart], homes: Homes, home_bytes_in: Callable[[str], int]) -> None:
        """Raise ``CapacityError`` if a GPU tier cannot hold a gradient sum in addition to homes and full copies."""
        name = self.compute_tier
        if name == "ram":
            return
        tier = self.store.tier(name)
        room = free_home_bytes(self.store, name) - home_bytes_in(name) - self._reserved_bytes[name]
        for part in parts_of(units):
            need_bytes = tier.slot_bytes(self.gathered_bytes(part.layout, torch.float32))
            lane = lane_key(part.gradient_key, self.own_lanes[0])
            if part.layout.trainable and homes[lane] != name and need_bytes > room:
                detail = (
                    f"to sum the gradients of {part.layout.name} next to gathered weights. Increase the size of {name}"
                )
                raise CapacityError(name, need_bytes, max(0, room), detail=detail)


def lane_key(gradient_key: str, lane: int) -> str:
    """Return the key of the block that contains the gradient sum of one lane."""
    return f"{gradient_key}.lane{lane}"


class UnshardedBlock:
    """A full copy of a weight block, gathered from the shards of all ranks. It has the interface of a lease.

    Attributes:
        tensor: Flat full copy, one value per element of the layout.
        mode: "r", "rw", or "w" if the block has no contents yet.
    """

    def __init__(self, ranks: ModuleRanks, part: Part, mode: str) -> None:
        ranks.announce(f"the weights of {part.weight_key}" + (" to change them" if mode != "r" else ""))
        self._ranks, self._part, self.mode = ranks, part, mode
        nbytes = ranks.gathered_bytes(part.layout, part.dtype)
        with ExitStack() as stack:
            stack.enter_context(ranks.use_memory(ranks.compute_tier, nbytes))
            self.tensor = self._gather(nbytes)[: part.layout.num_elements]
            self._memory = stack.pop_all()

    def _gather(self, nbytes: int) -> Tensor:
        ranks, count, dtype = self._ranks, self._ranks.num_gathered_elements(self._part.layout), self._part.dtype
        if self.mode == "w":
            return torch.zeros(count, dtype=dtype, device=ranks.device)
        with ranks.use_memory("ram", 0 if ranks.compute_tier == "ram" else nbytes):
            full_copy = torch.empty(count, dtype=dtype)
            with self._ranks.store.acquire(self._part.weight_key, "ram", "r") as lease:
                ranks.collectives.gather(full_copy, lease.tensor)
            return full_copy.to(ranks.device)  # the call waits for the copy, because the source is not pinned

    def release(self) -> None:
        """Write this rank's shard to the store if the copy is writable, then drop the copy."""
        if self.mode != "r":
            with torch.no_grad(), self._ranks.store.acquire(self._part.weight_key, "ram", "w") as lease:
                self._ranks.write_shard(lease.tensor, self._part.layout, self.tensor)
        self.abandon()

    def abandon(self) -> None:
        """Drop the copy without writing changes."""
        self._memory.close()


class SharedGradients(GradientBlock):
    """Gradients of parameters that several ranks share. This rank keeps one sum per lane until the exchange.

    The exchange writes this rank's shard of the sum over all lanes of all ranks to the block ``key``.
    """

    def __init__(self, ranks: ModuleRanks, part: Part) -> None:
        super().__init__(ranks.store, part.gradient_key, part.layout, part.parameters)
        self.ranks = ranks
        self.factor = 1.0 / ranks.lanes.count  # turns the sum over all lanes into their mean
        self._lane_keys = {lane: lane_key(self.key, lane) for lane in ranks.own_lanes}
        self._filled_by_lane: dict[int, set[str]] = {lane: set() for lane in ranks.own_lanes}
        self.is_exchanged = False

    def exchange(self, filled_on_any_rank: set[str]) -> None:
        """Add the lanes of all ranks, and write this rank's shard of the sum to the block. This is a collective."""
        self._filled = filled_on_any_rank
        self.ranks.announce(f"the gradients of {self.key}")
        if self.updater is not None:
            self.updater.finish_update()  # the previous step's update reads the block
        with self.ranks.use_memory("ram", self.ranks.exchange_bytes(self.layout)):
            modes = {lane: "rw" if names else "w" for lane, names in self._filled_by_lane.items()}
            requests: list[Any] = [(key, "ram", modes[lane]) for lane, key in self._lane_keys.items()]
            with torch.no_grad(), self._store.acquire_many([*requests, (self.key, "ram", "w")]) as leases:
                sums = {lane: leases.of(key).tensor for lane, key in self._lane_keys.items()}
                for lane, tensor in sums.items():
                    self._zero_unfilled(tensor, self._filled_by_lane[lane])
                leases.of(self.key).tensor.copy_(self.ranks.sum_lanes(sums))
        for key in self._lane_keys.values():
            self._store.discard(key)
        self.is_exchanged = True

    def _zero_unfilled(self, sums: Tensor, names: set[str]) -> None:
        """Zero a lane's sums of parameters that have no gradient in this lane."""
        if not names:
            sums.zero_()
        for entry in self.layout.entries if names else ():
            if entry.name not in names:
                self.view(sums, entry).zero_()

    def partial_squares(self, threads: KernelThreads) -> list[float]:
        """Return the sums of squares of consecutive chunks of 65,536 elements in this rank's shard, in order."""
        owned = len(self.ranks.owned_range(self.layout))
        with self._store.acquire(self.key, "ram") as lease:
            squares: list[float] = partial_squares(lease.tensor[:owned], threads).tolist()
        return squares

    def clear(self) -> None:
        super().clear()
        self.is_exchanged = False
        for names in self._filled_by_lane.values():
            names.clear()

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        super().drop_gradient(parameter)
        for names in self._filled_by_lane.values():
            names.discard(self._names[id(parameter)])

    def _add(self, entry: TensorEntry, gradient: Tensor) -> None:
        if self.is_exchanged:
            raise WeightInUseError(
                f"a gradient of {entry.name} arrived after gradients were exchanged for the norm. Run all "
                "backward passes of a step before measure_grad_norm(), or clear the gradients"
            )
        names = self._filled_by_lane[self.ranks.lane]
        key = self._lane_keys[self.ranks.lane]
        with torch.no_grad(), self._store.acquire(key, self._tier, "rw" if names else "w") as lease:
            if not names:
                lease.tensor.zero_()  # zero all padding, because the exchange also adds the padding
            sums = {entry.name: self.view(lease.tensor, entry).view(entry.shape)}
            GradientAccumulator(sums, names).add(entry.name, gradient)
        self._filled.add(entry.name)


def exchange_gradients(
    groups: Sequence[StateGroup], threads: KernelThreads, *, with_norm: bool = True
) -> dict[nn.Parameter, float]:
    """Exchange the gradients of parameters that ranks share, and return each shared group's squared norm.

    A norm's key is the first parameter of its group. The norm is computed from the mean over all lanes. It is summed
    over chunks of 65,536 elements of the layout, so it is bit-identical for any number of ranks. This is a collective.

    Args:
        groups: Groups of the step. Only shared groups whose gradients are not exchanged yet are exchanged.
        with_norm: Whether to compute norms. Without norms, the result is empty.
    """
    norms: dict[nn.Parameter, float] = {}
    sources = {source: group for group in groups if isinstance(source := group.gradients, SharedGradients)}
    for ranks in dict.fromkeys(source.ranks for source in sources):
        ranks.announce("the end of a backward: step() or measure_grad_norm()")
        gradients = [source for source in sources if source.ranks is ranks]
        if not all(source.is_exchanged for source in gradients):
            filled = ranks.collectives.gather_objects([source.filled_names for source in gradients])
            for source, *names in zip(gradients, *filled, strict=True):
                source.exchange(set().union(*names))
        if not with_norm:
            continue
        partials = ranks.collectives.gather_objects([source.partial_squares(threads) for source in gradients])
        for source, *by_rank in zip(gradients, *partials, strict=True):
            squares = add_in_order(torch.tensor([chunk for part in by_rank for chunk in part], dtype=torch.float64))
            if source.filled_names:
                norms[next(iter(sources[source].parameters.values()))] = squares * source.factor**2
    return norms


def _check_trained_parameters(model: nn.Module, parts: Sequence[Part]) -> None:
    """Raise an error if a trained parameter is outside of the store, because each rank would train it separately."""
    stored_ids = {id(parameter) for part in parts for parameter in part.parameters.values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in stored_ids:
            raise OffloadError(
                f"{name} is trained but left out of the store, so with group=... its gradient would stay on one rank. "
                "Freeze it, or offload it too"
            )


def check_same_module(ranks: ModuleRanks, model: nn.Module, layouts: Sequence[UnitLayout]) -> None:
    """Raise ``RanksDifferError`` if a module differs between ranks. The message contains the first difference."""
    parts = {"gradient_lanes": str(ranks.lanes.count)}
    parts |= {f"the layout of {layout.name}": str(layout.entries) for layout in layouts}
    for name, parameter in model.named_parameters():
        is_loaded = parameter.device.type != "meta"
        values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data if is_loaded else b""
        parts[name] = f"{parameter.dtype}, {parameter.requires_grad}, {xxh3_128_digest(values).hex()}"
    check_same(ranks.collectives.gather_objects, "offloaded module", parts)


def _text(announcement: tuple[int, str]) -> str:
    return f"{announcement[1]} as number {announcement[0]}"
