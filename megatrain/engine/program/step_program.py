"""Program of one training step: its blocks, its ticks in order, and the blocks that each tick uses.

Every call of a unit in a forward is a *visit*. A step has one tick for each visit's forward, one for the head, one for
each visit's backward, and one for the update of each group of weights:

    update 0, forward 0, update 1, forward 1, ..., head, ..., backward 1, backward 0

With several ranks, each block holds a shard (`ranks/shards.py`). Visits then have gather ticks before them and exchange
ticks after them:

    update 0, gather 0, forward 0, ..., gather 0, backward 0, exchange 0

A trace (`visit_trace.py`) lists the units that a model visits and the tensors that each visit saves for its backward.
`ProgramBuilder` turns the trace into a program. The planner reads the program to count bytes and to choose a home for
every block. From the program and the homes, `tape.compile_step` derives the leases of a step. The running model
requests the leases through `BlockAccess`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.program.block_keys import gradient_key, key_layout, part_keys, state_key, weight_key
from megatrain.engine.program.block_plan import DURABLE_KINDS, BlockPlan
from megatrain.engine.program.encoding import Encoding
from megatrain.engine.program.visit_trace import Recompute
from megatrain.optim.matrices import DIRECTION_BYTES
from megatrain.ranks.shards import NETWORK, PEER, Sharding, peer_links
from tiered import Access, Mode, Schedule
from tiered.units import round_up

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout

#: Phases that the running model announces. Ticks of other phases come between the announced ticks.
ModelPhase = Literal["forward", "head", "backward"]

Phase = Literal["forward", "head", "backward", "update", "gather", "exchange"]

#: Maps the (tick, key) of a use to the tick of the block's next use. The copy stays pinned until the next use. If the
#: second tick is not later than the first, the next use belongs to the next step.
NextUses = Mapping[tuple[int, str], int]

#: Blocks that are leased together, as (key, mode) pairs.
Group = tuple[tuple[str, Mode], ...]

_DECODED_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Tick:
    """One position in a step, with the blocks used there.

    Attributes:
        phase: Kind of work. Updates run in the tier that ``StepProgram.tick_tier`` returns, others in the compute tier.
        visit: Index of the layout for ``update``, or number of the visit for other phases.
        held: Blocks that are leased together for the whole tick.
        passing: Groups of blocks. The tick leases one group at a time, for example an activation of a micro-batch, or
            one part of a layout's state and gradient.
        spent: Keys of blocks that no later tick reads. Their copies are discarded, never written back.
        served_phase: Phase for which a ``gather`` or ``exchange`` tick moves weights or gradients; otherwise None.
            Passing parts are gathered and exchanged within the visit's own tick.
    """

    phase: Phase
    visit: int
    held: Group
    passing: tuple[Group, ...] = ()
    spent: frozenset[str] = frozenset()
    served_phase: ModelPhase | None = None

    @property
    def uses(self) -> Group:
        """All blocks of the tick, in lease order."""
        return (*self.held, *(use for group in self.passing for use in group))


@dataclass(frozen=True, slots=True)
class LayoutSplits:
    """Division of layouts into blocks.

    Attributes:
        parts: Element ranges of parts, by layout, for layouts with several parts. Each kind of state and the gradient
            have one block per part.
        weights: Layouts whose weight also has one block per part: all its visits accept parts, or ranks own shards.
        passing: Pairs (visit, layout). The visit leases the layout's gradient and any cut weight one part at a time.
    """

    parts: Mapping[str, Sequence[range]] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    passing: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupUpdates:
    """Settings for weight updates: when they run, in which tier, and what they move in addition to blocks.

    Layouts are identified by index.

    Attributes:
        are_deferred: Whether the next step runs the updates, because they need the gradient norm of the whole step.
        in_compute_tier: Whether the optimizer can update blocks in the compute tier.
        overlaps_device: Whether the host updates a layer while a device computes the next layer. If updates are not
            deferred, the overlap needs memory for the gradients of one more layer.
        streamed: Layouts updated in the compute tier, regardless of their blocks' homes. The update fetches one part at
            a time and writes it back.
        sent_elements: Number of matrix elements, by layout, that an update in RAM sends to the compute device and back.
    """

    are_deferred: bool = True
    in_compute_tier: bool = False
    overlaps_device: bool = True
    streamed: frozenset[int] = frozenset()
    sent_elements: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepProgram:
    """All blocks and ticks of a step. Ticks are numbered by their position.

    Deferred ``update`` ticks finish the previous step, because clipping needs the norm of all its gradients. Each group
    is updated just before the first forward that reads its weights. The first step runs no deferred updates. After the
    last step, a tape with only the deferred updates runs. An update that is not deferred runs after the backward that
    completes its gradient.

    Attributes:
        encodings: Encodings of weights whose blocks do not hold the weight itself, by layout. Each visit decodes them.
        occupants: Gradient that a shared block holds in a tick, by (tick, key of the block); see ``sharing.py``.
    """

    blocks: Mapping[str, BlockPlan]
    ticks: tuple[Tick, ...]
    compute_tier: str
    cuts: LayoutSplits = field(default_factory=LayoutSplits)
    updates: GroupUpdates = field(default_factory=GroupUpdates)
    recompute: Recompute = field(default_factory=Recompute)
    sharding: Sharding = field(default_factory=Sharding)
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    occupants: Mapping[tuple[int, str], BlockPlan] = field(default_factory=dict)

    def layout_parts(self, layout: UnitLayout) -> Sequence[range]:
        """Return the element range of each part of a layout."""
        return self.cuts.parts.get(layout.name) or (range(layout.num_elements),)

    def owned_layout_parts(self, layout: UnitLayout) -> Sequence[range]:
        """Return the range of elements that this rank owns in each part of a layout's state and gradient."""
        return [self.sharding.shards.owned_range(part) for part in self.layout_parts(layout)]

    def weight_keys(self, layout: UnitLayout) -> list[str]:
        """Return the keys of the blocks that hold a weight or its encoding."""
        encoding = self.encodings.get(layout.name)
        if encoding is not None and encoding.keys:
            return list(encoding.keys)
        return part_keys(weight_key(layout.name), len(self.weight_parts(layout)))

    def weight_parts(self, layout: UnitLayout) -> Sequence[range]:
        """Return the element range of each block of a layout's weight. With ranks, each block holds a shard."""
        encoding = self.encodings.get(layout.name)
        is_cut = layout.name in self.cuts.weights or (encoding is not None and bool(encoding.keys))
        return self.layout_parts(layout) if is_cut else (range(layout.num_elements),)

    def decoded_bytes(self, visit: int, layout: UnitLayout) -> int:
        """Return the memory in bytes for a weight that a visit decodes; 0 if the blocks hold the weight itself."""
        encoding = self.encodings.get(layout.name)
        if encoding is None or not self.sharding.shards.is_local:  # gathers already decode shards into full copies
            return 0
        keys, is_cut = self.weight_keys(layout), layout.name in self.cuts.weights
        if encoding.dtype == self.blocks[keys[0]].dtype and (len(keys) == 1 or is_cut):
            return 0
        sizes = [len(part) * encoding.dtype.itemsize for part in self.weight_parts(layout)]
        nbytes = max(sizes) if self.is_passing_weight(visit, layout.name) else sum(sizes)
        return round_up(nbytes, _DECODED_ALIGNMENT_BYTES)  # keeps adjacent decoded weights aligned

    def gathered_dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which ranks gather a block. Averages are rounded to this dtype before the gather."""
        block = self.blocks[key]
        return block.dtype if block.kind == "weights" else self.encodings[key_layout(block.tensor_key)].dtype

    def gathered_bytes(self, key: str) -> int:
        """Return how many bytes a rank sends to each other rank when a block is gathered."""
        return self.blocks[key].num_elements * self.gathered_dtype(key).itemsize

    def owned_weight_parts(self, layout: UnitLayout) -> Sequence[range]:
        """Return the range of elements that this rank owns in each block of a layout's weight."""
        return [self.sharding.shards.owned_range(part) for part in self.weight_parts(layout)]

    def full_elements(self, layout: UnitLayout) -> int:
        """Return how many elements a full copy of a layout's weight or gradient has, including shard padding."""
        return max(self.sharding.shards.gathered_range(part).stop for part in self.layout_parts(layout))

    def links_between_ranks(self) -> list[str]:
        """Return the names of the links to and from other ranks."""
        lanes = self.sharding.lanes
        return peer_links(self.compute_tier, lanes.size, lanes.num_hosts)

    def bytes_outside_blocks(self, tick_index: int) -> dict[str, int]:
        """Return how many bytes the tick at position ``tick_index`` moves in addition to blocks, by link.

        An update can send matrices to the compute device and back. Other ticks gather weights and exchange gradients.
        """
        tick, moved_bytes = self.ticks[tick_index], dict[str, int]()
        if tick.phase == "update" and (sent_elements := self.updates.sent_elements.get(tick.visit)):
            links = f"ram->{self.compute_tier}", f"{self.compute_tier}->ram"
            moved_bytes = dict.fromkeys(links, DIRECTION_BYTES * sent_elements)
        return moved_bytes if self.sharding.shards.is_local else moved_bytes | self._collective_bytes(tick_index)

    def _collective_bytes(self, tick_index: int) -> dict[str, int]:
        """Return how many bytes the tick at position ``tick_index`` sends to and receives from other ranks, by link."""
        tick = self.ticks[tick_index]
        moved_bytes = dict.fromkeys(self.links_between_ranks(), 0)
        if tick.phase == "update":
            return moved_bytes
        gathered_keys = [key for key, _ in tick.uses if self.is_gathered(key)]
        self._count_collectives(moved_bytes, sum(map(self.gathered_bytes, gathered_keys)), is_gather=True)
        # Ranks send gradient sums in fp32, regardless of the dtype of stored gradients.
        blocks = [self.contents(tick_index, key) for key, mode in tick.uses if mode != "r"]
        num_elements = sum(block.num_elements for block in blocks if block.kind == "gradients")
        self._count_collectives(moved_bytes, 4 * num_elements, is_gather=False)
        return moved_bytes

    def is_gathered(self, key: str) -> bool:
        """Return whether ranks gather a block before the model reads it. False for activations and gradients."""
        return self.blocks[key].kind in DURABLE_KINDS

    def _count_collectives(self, moved_bytes: dict[str, int], shard_bytes: int, *, is_gather: bool) -> None:
        """Add the bytes that one collective sends and receives, for shards that have ``shard_bytes`` bytes each."""
        lanes, rank = self.sharding.lanes, self.sharding.shards.rank
        num_sent = 1 if is_gather else len(lanes.rank_sums(rank))
        num_received = lanes.size - 1 if is_gather else lanes.num_sums - num_sent
        peer = PEER if lanes.num_hosts == 1 else NETWORK
        moved_bytes[f"{self.compute_tier}->{peer}"] += (lanes.size - 1) * num_sent * shard_bytes
        moved_bytes[f"{peer}->{self.compute_tier}"] += num_received * shard_bytes

    def is_passing_weight(self, visit: int, layout: str) -> bool:
        """Return whether a visit leases the parts of a weight one at a time."""
        return layout in self.cuts.weights and (visit, layout) in self.cuts.passing

    def state_keys(self, layout: UnitLayout, state: str) -> list[str]:
        """Return the keys of the blocks that hold one kind of state for a layout, in part order."""
        return part_keys(state_key(layout.name, state), len(self.layout_parts(layout)))

    def gradient_keys(self, layout: UnitLayout, use_site: int) -> list[str]:
        """Return the keys of a use site's gradient accumulators, in part order."""
        return part_keys(gradient_key(layout.name, use_site), len(self.layout_parts(layout)))

    def contents(self, tick_index: int, key: str) -> BlockPlan:
        """Return the contents of the block ``key`` in a tick: the block itself, or a gradient that shares its memory.

        Args:
            tick_index: Position of a tick that uses the block.
        """
        return self.occupants.get((tick_index, key)) or self.blocks[key]

    def select_ticks(self, *, updates: bool = True, passes: bool = True) -> dict[int, Tick]:
        """Return the requested ticks of a step, in order, by position.

        Args:
            updates: Whether to include the deferred updates, which finish the previous step.
            passes: Whether to include all other ticks.
        """
        return {n: tick for n, tick in enumerate(self.ticks) if (updates if self._is_deferred(tick) else passes)}

    def _is_deferred(self, tick: Tick) -> bool:
        return self.updates.are_deferred and tick.phase == "update"

    def tick_tier(self, tick: Tick, homes: Mapping[str, str]) -> str:
        """Return the tier in which a tick leases its blocks.

        An update uses the compute tier if its weights and state have their homes there, or if the plan streams it.
        Other updates use RAM.
        """
        if tick.phase != "update":
            return self.compute_tier
        if not self.updates.in_compute_tier:
            return "ram"
        if tick.visit in self.updates.streamed:
            return self.compute_tier
        # Check the weight first, which usually decides the result, because plans call this method often.
        groups = chain((tick.held,), tick.passing)
        is_local = all(homes[key] == self.compute_tier for group in groups for key, _ in group if key not in tick.spent)
        return self.compute_tier if is_local else "ram"

    def accesses(self, homes: Mapping[str, str]) -> Iterator[Access]:
        """Yield every access of the step, in order."""
        for index, tick in enumerate(self.ticks):
            tier = self.tick_tier(tick, homes)
            for key, mode in tick.uses:
                yield Access(index, key, tier, mode)

    def schedule(self, homes: Mapping[str, str], num_steps: int, *, first_step: int = 0) -> Schedule:
        """Return the schedule of ``num_steps`` steps that start at ``first_step``, including their deferred updates."""
        # Omit reads at home, which move nothing. Keep writes at home, because a copy prefetched earlier would be stale.
        accesses = [access for access in self.accesses(homes) if homes[access.key] != access.tier or access.mode != "r"]
        period = len(self.ticks)
        deferred_ticks = [index for index, tick in enumerate(self.ticks) if self._is_deferred(tick)]
        start, end = first_step * period, (first_step + num_steps) * period
        return Schedule(accesses, period, end, start=start, deferred=deferred_ticks)
