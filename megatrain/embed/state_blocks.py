"""Blocks of a store that contain the optimizer state of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatrain.base.layout import TensorEntry, UnitLayout
from megatrain.embed.block_homes import shared_state
from megatrain.engine.program.block_keys import state_key
from megatrain.optim.base import Segment, StateKind
from tiered import Lease, Mode, TieredStore


@dataclass(frozen=True, slots=True)
class LayoutShard:
    """Shard of a layout that this process owns. All shards have the same number of elements, including padding."""

    index: int
    count: int
    owned: range
    num_elements: int


class StateBlocks:
    """Optimizer state of a layout's parameters, one block per kind. The constructor registers and zeroes the blocks.

    Args:
        root: Key prefix of the blocks.
        homes: Allowed home tiers, preferred first.
        names: Segment names, by name in the layout. They must not depend on where the state is stored.
        shard: Shard of the layout that the blocks contain; None if they are whole.

    Attributes:
        kinds: Kinds of state, by name.
        keys: Keys of the blocks, by kind.
        keys_outside_ram: Keys of the blocks whose home is not RAM.
        starts: Index of each parameter's first element, by kind and name in the layout.
    """

    def __init__(
        self,
        store: TieredStore,
        root: str,
        layout: UnitLayout,
        kinds: Sequence[StateKind],
        homes: Sequence[str],
        names: Mapping[str, str],
        shard: LayoutShard | None = None,
    ) -> None:
        self.store, self.layout, self.shard, self._names = store, layout, shard, names
        self.kinds = {kind.name: kind for kind in kinds}
        self.keys = {name: state_key(root, name) for name in self.kinds}
        self.starts = {name: kind.starts(layout) for name, kind in self.kinds.items()}
        self.keys_outside_ram: list[str] = []
        for kind in kinds:
            key = self.keys[kind.name]
            num_elements = kind.num_elements(layout) if shard is None else kind.elements_for(shard.num_elements)
            home = shared_state(store).register(key, num_elements, kind.dtype, homes, durable=True)
            with self.lease(kind.name, "w") as lease:
                lease.tensor.zero_()
            if home != "ram":
                self.keys_outside_ram.append(key)
        self.evict()

    def close(self) -> None:
        """Unregister the blocks. Committed generations keep their contents."""
        shared_state(self.store).unregister(*self.keys.values())

    def lease(self, kind: str, mode: Mode = "r") -> Lease:
        """Lease the block of one kind in RAM."""
        return self.store.acquire(self.keys[kind], "ram", mode)

    def prefetch(self) -> None:
        """Prefetch as much of the state for the next update as fits in RAM."""
        for key in self.keys_outside_ram:
            self.store.prefetch(key, "ram")

    def evict(self) -> None:
        """Start evicting the state. Called after an update, so that the write-back overlaps with other updates."""
        for key in self.keys_outside_ram:
            self.store.evict(key, "ram")

    def view(self, kind: str, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return a flat view of a parameter's state in a block. It is empty if a shard contains none of it."""
        if self.shard is None:
            return flat.narrow(0, self.starts[kind][entry.name], self.kinds[kind].length_of(entry))
        owned, granularity = self.shard.owned, self.kinds[kind].granularity
        start = min(max(entry.offset, owned.start), owned.stop) - owned.start
        stop = max(start, min(entry.offset + entry.numel, owned.stop) - owned.start)
        return flat[start // granularity : -(-stop // granularity)]

    def segment(self, entry: TensorEntry, weight_decay: float, start: int, *, first: int = 0) -> Segment:
        """Return a parameter's segment of a block. ``first``: Index of the segment's first element in the parameter."""
        return Segment(
            start,
            start + entry.numel,
            weight_decay,
            shape=entry.shape,
            state_starts={n: self.starts[n][entry.name] for n, kind in self.kinds.items() if kind.elements_of},
            name=self._names[entry.name],
            param_start=first,
        )

    def local_segment(self, entry: TensorEntry, weight_decay: float) -> Segment | None:
        """Return a parameter's segment in the blocks, or None if a shard contains none of it."""
        segment = self.segment(entry, weight_decay, entry.offset)
        if self.shard is None:
            return segment
        part = segment.within(self.shard.owned)
        return part if part.start < part.stop else None
