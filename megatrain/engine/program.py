"""Program of one training step: its blocks, its ticks in order, and the blocks that each tick uses.

Every unit call of a forward is a *visit*. A step has one tick per visit forward, one for the head, one per visit
backward, and one per group of weights to update:

    update 0, forward 0, update 1, forward 1, ..., head, ..., backward 1, backward 0

With several ranks, each block holds a shard (`ranks/shards.py`), and gather and exchange ticks surround the visits:

    update 0, gather 0, forward 0, ..., gather 0, backward 0, exchange 0

A trace (`trace.py`) lists the units that a model visits and the tensors that each visit saves for its backward.
`ProgramBuilder` turns the trace into a program. The planner uses the program to count bytes and to choose a home for
every block. `tape.compile_step` turns the program and the homes into the leases of a step. The running model requests
the leases through `BlockAccess`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from megatrain.engine.encoding import AveragedWeight, Encoding
from megatrain.engine.saved_results import NOT_SAVABLE, Savable
from megatrain.engine.unneeded import NOTHING_UNNEEDED, Unneeded
from megatrain.engine.work import NO_WORK, Work
from megatrain.optim.base import MatrixOptimizer
from megatrain.optim.matrices import DIRECTION_BYTES, matrix_elements
from megatrain.ranks.shards import NETWORK, PEER, Sharding, peer_links
from tiered import Access, Mode, Schedule
from tiered.units import round_up

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.models.graph import ModelGraph, Unit
    from megatrain.optim.base import Optimizer

__all__ = [
    "DURABLE_KINDS",
    "KEEP_NOTHING",
    "KINDS",
    "BlockAccess",
    "BlockPlan",
    "Cuts",
    "FrozenWeights",
    "GradientSink",
    "Group",
    "GroupUpdates",
    "Kind",
    "MatrixParts",
    "ModelPhase",
    "Phase",
    "ProgramBuilder",
    "Recompute",
    "Stays",
    "StepProgram",
    "Tick",
    "TracedVisit",
    "VisitMemory",
    "VisitTrace",
    "WeightAccess",
    "activation_key",
    "activations_of",
    "results_key",
    "cache_key",
    "decoded_bytes",
    "evaluation_program",
    "gathers_before",
    "gradient_key",
    "keeping_graphs",
    "kind_of_key",
    "layout_of_key",
    "layouts_of_unit",
    "part_keys",
    "reading_averages",
    "saving_results",
    "state_key",
    "stored_keys",
    "uses_of_layouts",
    "weight_block",
    "weight_key",
]


@dataclass(frozen=True, slots=True)
class VisitMemory:
    """Bytes that one visit of one micro-batch uses on the compute device outside of blocks.

    Attributes:
        held_nbytes: Live bytes at the start of the visit: hidden states, masks, tables; no weights or accumulators.
        stays_nbytes: Bytes of `held_nbytes` that live until the backward (masks, tables, ids, autograd's saved tensors
            between visits). In layer order each micro-batch holds these bytes once. It holds the rest of `held_nbytes`
            twice, for this visit and for the next one.
        forward_nbytes: Peak above `held_nbytes` from the start of the unit to the next visit.
        backward_nbytes: Peak of recompute and backward above `held_nbytes`, including parameter gradients.
        graph_nbytes: Size of the forward's graph if it is kept for the backward: tensors saved by autograd, inputs, and
            weights cast to another dtype. The weights themselves and tensors that visits share are excluded.
    """

    held_nbytes: int
    stays_nbytes: int
    forward_nbytes: int
    backward_nbytes: int
    graph_nbytes: int


@dataclass(frozen=True, slots=True)
class TracedVisit:
    """One unit call in a forward.

    Attributes:
        is_head: Whether the unit runs in the head phase, one piece at a time.
        has_backward: Whether the unit has a backward. False if no parameter up to its output is trained, or if the loss
            does not depend on its output. The backward announces such a visit, but leases no weights for it.
        saved: `(shape, dtype)` of every activation that is kept in a block until the backward.
        reused: Input index -> (visit, index) of an earlier activation that is the same tensor and shares its block.
        chance_of_no_token: Probability that one token is not routed to these experts, assuming uniform routing.
        backward: Work of recompute and backward, as executed; `NO_WORK` for visits of the head.
        by_part: Parameters whose weight and gradient the visit can process one part at a time, by their owners' names.
        attention: Results of attention kernels that can be saved for the recompute.
        results: Results of attention kernels and needed products that can be saved for the recompute.
    """

    unit: int
    is_head: bool
    has_backward: bool
    saved: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    memory: VisitMemory
    forward: Work = NO_WORK
    backward: Work = NO_WORK
    by_part: frozenset[str] = frozenset()
    attention: Savable = NOT_SAVABLE
    results: Savable = NOT_SAVABLE
    reused: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    chance_of_no_token: float = 0.0
    unneeded: Unneeded = NOTHING_UNNEEDED

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward runs the unit a second time, unless its graph is kept."""
        return self.has_backward and not self.is_head

    @property
    def recompute(self) -> Work:
        """Work of the recompute, which `backward` includes; `NO_WORK` without a recompute."""
        return self.forward - self.unneeded.work if self.is_recomputed else NO_WORK


@dataclass(frozen=True, slots=True)
class VisitTrace:
    """Visits of one forward in order. The visits of the head come last.

    Attributes:
        head_nbytes: Peak of the head phase of one micro-batch above the held bytes: one piece of logits with its
            gradients, and the gradient of the trunk's output.
        head_rows: Rows of logits computed at a time; 0 if the head is not chunked.
        head_columns: Columns of the vocabulary computed at a time; 0 for the whole vocabulary.
        head_part_nbytes: Size of the graph of one part's logits, if the graph is kept for the second pass.
            ``head_nbytes`` includes one graph.
        guesses: One sentence for each value that the trace guessed, with place and reason. Any guess makes the counts
            estimates.
        uncounted: Operators without a FLOP formula, with reasons. Byte counts do not depend on FLOP formulas.
        head: Work of the head's forward and backward if every token has a label and each logit is computed once.
        logits_flops: FLOPs of computing all logits once. The second pass recomputes the logits that were not kept.
        dense_masks: Reasons why the model builds [S, S] masks, whose memory grows with the square of the row length.
    """

    visits: tuple[TracedVisit, ...]
    head_nbytes: int
    head_rows: int
    guesses: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    head: Work = NO_WORK
    num_tokens: int = 0
    dense_masks: tuple[str, ...] = ()
    head_columns: int = 0
    head_parts: int = 1
    head_part_nbytes: int = 0
    logits_flops: int = 0

    @property
    def exact(self) -> bool:
        """Whether byte counts are exact: true if no value was guessed."""
        return not self.guesses


#: Phases that the running model announces. Ticks of other phases come between the announced ticks.
ModelPhase = Literal["forward", "head", "backward"]
Phase = Literal["forward", "head", "backward", "update", "gather", "exchange"]
Kind = Literal["weights", "optimizer", "gradients", "activations"]

#: (tick, key) of a use -> tick of the block's next use, until which the copy stays pinned. If that tick is not later
#: than the first, it belongs to the next step.
Stays = Mapping[tuple[int, str], int]

#: (key, mode) of blocks that are leased together.
Group = tuple[tuple[str, Mode], ...]

_DECODED_ALIGNMENT_BYTES = 64

#: Kinds of blocks whose contents outlive a step. Checkpoints hold these.
DURABLE_KINDS: tuple[Kind, ...] = ("weights", "optimizer")

#: Kinds in display order. If two kinds save the same number of bytes, the first one gets the faster tier.
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Block of the run: a flat tensor of ``num_elements`` elements of ``dtype``.

    Attributes:
        part_of: Common key of all parts, if the block is a part; otherwise empty.
        in_folder: Whether the model folder has the contents and no step writes the block. Checkpoints then omit it.
        in_place: Whether uses can read the block from the model folder, so that the folder can be its home.
        num_packed: Number of elements that a block of packed bytes decodes to; 0 without packed bytes.
    """

    key: str
    kind: Kind
    num_elements: int
    dtype: torch.dtype
    part_of: str = ""
    in_folder: bool = False
    in_place: bool = False
    num_packed: int = 0

    @property
    def whole(self) -> str:
        """Common key of all parts, or the block's own key if it is not a part."""
        return self.part_of or self.key

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def num_values(self) -> int:
        """Number of elements that the block holds or decodes to."""
        return self.num_packed or self.num_elements

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints hold the block."""
        return self.kind in DURABLE_KINDS and not self.in_folder


@dataclass(frozen=True, slots=True)
class Tick:
    """One position in a step, with the blocks that it uses.

    Attributes:
        phase: Updates run in the tier that ``StepProgram.tier_of`` returns, all other phases in the compute tier.
        visit: Index of the layout for ``update``; ordinal of the unit call for other phases.
        held: (key, mode) of blocks leased together for the whole tick.
        passing: Groups of (key, mode). The tick leases one group at a time. A group is an activation of a micro-batch,
            or one part of a layout's state and gradient.
        spent: Keys whose contents are dead after the tick. Their copies are discarded, never written back.
        serves: Phase of the visit for which a ``gather`` or ``exchange`` tick moves weights or gradients; None for
            other ticks. Passing parts are gathered and exchanged within the visit's own tick.
    """

    phase: Phase
    visit: int
    held: Group
    passing: tuple[Group, ...] = ()
    spent: frozenset[str] = frozenset()
    serves: ModelPhase | None = None

    @property
    def uses(self) -> Group:
        """All blocks of the tick, in the order of their leases."""
        return (*self.held, *(use for group in self.passing for use in group))


@dataclass(frozen=True, slots=True)
class Cuts:
    """How layouts are cut into blocks.

    Attributes:
        parts: Layout with several parts -> element ranges of the blocks of its state and gradients.
        weights: Layouts whose weight also has one block per part, because all visits accept parts or because ranks own
            shards of parts.
        passing: (visit, layout) of gradients and cut weights whose parts are leased one at a time.
    """

    parts: Mapping[str, Sequence[range]] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    passing: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Recompute:
    """Forward results that a step keeps so that the backward recomputes less. The step stays bit-identical.

    A visit is in at most one of the first three sets.

    Attributes:
        kept_graphs: Visits whose graphs are kept for the backward. Their inputs have no blocks.
        saved_attention: Visits that save their attention results in blocks for the recompute.
        saved_results: Visits that save their attention and product results in blocks.
        kept_parts: Number of vocabulary parts whose logits the head keeps for its second pass.
    """

    kept_graphs: frozenset[int] = frozenset()
    saved_attention: frozenset[int] = frozenset()
    saved_results: frozenset[int] = frozenset()
    kept_parts: int = 1

    def savable(self, number: int, visit: TracedVisit) -> Savable:
        """Return the results that visit ``number`` saves for its recompute."""
        if number in self.saved_results:
            return visit.results
        return visit.attention if number in self.saved_attention else NOT_SAVABLE

    @property
    def saving(self) -> frozenset[int]:
        """Visits that save results in blocks."""
        return self.saved_attention | self.saved_results


#: The backward recomputes everything.
KEEP_NOTHING = Recompute()


@dataclass(frozen=True, slots=True)
class GroupUpdates:
    """Time and tier of weight updates, and their traffic outside of blocks. Layouts are identified by index.

    Attributes:
        are_deferred: Whether the next step runs the updates, because they need the gradient norm of the whole step.
        in_compute_tier: Whether the optimizer can update blocks in the compute tier.
        overlaps_device: Whether the host updates a layer while a device computes the next layer. If updates are not
            deferred, the overlap needs memory for the gradients of one more layer.
        streamed: Layouts updated in the compute tier, whatever the homes of their blocks. The update fetches one part
            at a time and writes it back.
        sent_elements: Layout -> matrix elements that an update in RAM sends to the compute device and back, in bf16.
    """

    are_deferred: bool = True
    in_compute_tier: bool = False
    overlaps_device: bool = True
    streamed: frozenset[int] = frozenset()
    sent_elements: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Sources of weights that are not trained.

    Attributes:
        in_folder: Whether the model folder has the weights, so that checkpoints omit them.
        in_place: Names of layouts that can stay in the model folder. Each use reads their weights from there.
        encodings: Layout -> encoding of its weight, if its blocks do not hold the weight itself.
    """

    in_folder: bool = False
    in_place: Collection[str] = ()
    encodings: Mapping[str, Encoding] = field(default_factory=dict)


@dataclass(frozen=True)
class StepProgram:
    """All blocks and ticks of a step. Ticks are numbered by their position.

    Deferred ``update`` ticks finish the previous step: clipping needs the global norm, which exists only after the
    whole backward. The next step updates each group just before the forward that first reads its weights. The first
    step runs no deferred updates, and the tape after the last step contains nothing else. An update that is not
    deferred follows the backward that completes its gradient.

    Attributes:
        cuts: Layouts that are cut into parts, and the parts that ticks lease one at a time.
        encodings: Layout -> encoding of its weight, if its blocks do not hold the weight itself. Each visit decodes the
            weight.
        occupants: (tick, key) -> gradient that a shared block holds in that tick (``sharing.py``).
    """

    blocks: Mapping[str, BlockPlan]
    ticks: tuple[Tick, ...]
    compute_tier: str
    cuts: Cuts = field(default_factory=Cuts)
    updates: GroupUpdates = field(default_factory=GroupUpdates)
    recompute: Recompute = field(default_factory=Recompute)
    sharding: Sharding = field(default_factory=Sharding)
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    occupants: Mapping[tuple[int, str], BlockPlan] = field(default_factory=dict)

    def parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the element ranges of a layout's parts: each has one block, or one shard per rank, of each state."""
        return self.cuts.parts.get(layout.name) or (range(layout.num_elements),)

    def owned_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the elements of a layout's parts that this rank owns: those in its blocks of state and gradients."""
        return [self.sharding.shards.owned(part) for part in self.parts_of(layout)]

    def weight_keys(self, layout: UnitLayout) -> list[str]:
        """Return the keys of the blocks that hold a weight, its parts, or its encoding."""
        encoding = self.encodings.get(layout.name)
        if encoding is not None and encoding.keys:
            return list(encoding.keys)
        return part_keys(weight_key(layout.name), len(self.weight_parts_of(layout)))

    def weight_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the element ranges of a layout's weight. Its blocks hold these ranges, or shards of them."""
        encoding = self.encodings.get(layout.name)
        is_cut = layout.name in self.cuts.weights or (encoding is not None and bool(encoding.keys))
        return self.parts_of(layout) if is_cut else (range(layout.num_elements),)

    def decoded_bytes(self, visit: int, layout: UnitLayout) -> int:
        """Return the bytes that a visit needs to decode a weight; 0 if the blocks hold the weight itself."""
        encoding = self.encodings.get(layout.name)
        if encoding is None or not self.sharding.shards.are_whole:  # gathers already decode shards into full copies
            return 0
        keys, is_cut = self.weight_keys(layout), layout.name in self.cuts.weights
        if encoding.dtype == self.blocks[keys[0]].dtype and (len(keys) == 1 or is_cut):
            return 0
        sizes = [len(part) * encoding.dtype.itemsize for part in self.weight_parts_of(layout)]
        nbytes = max(sizes) if self.passes_weight(visit, layout.name) else sum(sizes)
        return round_up(nbytes, _DECODED_ALIGNMENT_BYTES)  # keeps adjacent decoded weights aligned

    def gathered_dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which ranks gather a block. Averages are rounded to the compute dtype first."""
        block = self.blocks[key]
        return block.dtype if block.kind == "weights" else self.encodings[layout_of_key(block.whole)].dtype

    def gathered_bytes(self, key: str) -> int:
        """Return the bytes of a block that a rank sends to each other rank."""
        return self.blocks[key].num_elements * self.gathered_dtype(key).itemsize

    def owned_weight_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the elements of a layout's weight that this rank owns, by block."""
        return [self.sharding.shards.owned(part) for part in self.weight_parts_of(layout)]

    def full_elements(self, layout: UnitLayout) -> int:
        """Return the number of elements of a full copy of a layout's weight or gradient, including shard padding."""
        return max(self.sharding.shards.gathered(part).stop for part in self.parts_of(layout))

    def links_between_ranks(self) -> list[str]:
        """Return the names of the links to and from other ranks."""
        lanes = self.sharding.lanes
        return peer_links(self.compute_tier, lanes.size, lanes.num_hosts)

    def bytes_outside_blocks(self, number: int) -> dict[str, int]:
        """Return the bytes that the tick at position ``number`` moves outside of blocks, by link.

        An update sends the directions of matrices to the compute device and back. Other ticks gather and exchange.
        """
        tick, moved = self.ticks[number], dict[str, int]()
        if tick.phase == "update" and (sent := self.updates.sent_elements.get(tick.visit)):
            moved = dict.fromkeys((f"ram->{self.compute_tier}", f"{self.compute_tier}->ram"), DIRECTION_BYTES * sent)
        return moved if self.sharding.shards.are_whole else moved | self._collective_bytes(number)

    def _collective_bytes(self, number: int) -> dict[str, int]:
        """Return the bytes that the tick at position ``number`` exchanges with other ranks, by link."""
        tick = self.ticks[number]
        moved = dict.fromkeys(self.links_between_ranks(), 0)
        if tick.phase == "update":
            return moved
        gathered = [key for key, _ in tick.uses if self.is_gathered(key)]
        self._count_collectives(moved, sum(map(self.gathered_bytes, gathered)), is_gather=True)
        # Ranks send gradient sums in fp32, whatever the dtype of stored gradients.
        exchanged = [self.contents(number, key) for key, mode in tick.uses if mode != "r"]
        elements = sum(block.num_elements for block in exchanged if block.kind == "gradients")
        self._count_collectives(moved, 4 * elements, is_gather=False)
        return moved

    def is_gathered(self, key: str) -> bool:
        """Return whether ranks gather a block, because ticks other than updates read it as a weight."""
        return self.blocks[key].kind in DURABLE_KINDS

    def _count_collectives(self, moved: dict[str, int], shard: int, *, is_gather: bool) -> None:
        """Add the bytes that a gather or an exchange of shards of ``shard`` bytes sends and receives."""
        lanes, rank = self.sharding.lanes, self.sharding.shards.rank
        own = 1 if is_gather else len(lanes.sums_of_rank(rank))
        received = lanes.size - 1 if is_gather else lanes.num_sums - own
        place = PEER if lanes.num_hosts == 1 else NETWORK
        moved[f"{self.compute_tier}->{place}"] += (lanes.size - 1) * own * shard
        moved[f"{place}->{self.compute_tier}"] += received * shard

    def passes_weight(self, visit: int, layout: str) -> bool:
        """Return whether a visit leases the parts of a weight one at a time."""
        return layout in self.cuts.weights and (visit, layout) in self.cuts.passing

    def state_keys(self, layout: UnitLayout, state: str) -> list[str]:
        """Return the keys of one kind of a layout's state, one key per part."""
        return part_keys(state_key(layout.name, state), len(self.parts_of(layout)))

    def gradient_keys(self, layout: UnitLayout, use: int) -> list[str]:
        """Return the keys of a use site's gradient accumulators, one key per part."""
        return part_keys(gradient_key(layout.name, use), len(self.parts_of(layout)))

    def contents(self, tick: int, key: str) -> BlockPlan:
        """Return the block that ``key`` holds in a tick: the block itself, or a gradient that shares its memory.

        Args:
            tick: Position of a tick that uses the block.
        """
        return self.occupants.get((tick, key)) or self.blocks[key]

    def chosen_ticks(self, *, updates: bool = True, passes: bool = True) -> dict[int, Tick]:
        """Return the ticks of a step in order, by position.

        Args:
            updates: Whether to include the deferred updates, which finish the previous step.
        """
        return {n: tick for n, tick in enumerate(self.ticks) if (updates if self._is_deferred(tick) else passes)}

    def _is_deferred(self, tick: Tick) -> bool:
        return self.updates.are_deferred and tick.phase == "update"

    def tier_of(self, tick: Tick, homes: Mapping[str, str]) -> str:
        """Return the tier of a tick's leases.

        An update runs in the compute tier if weights and state have their home there, or if the plan streams the
        update. Other updates run in RAM.
        """
        if tick.phase != "update":
            return self.compute_tier
        if not self.updates.in_compute_tier:
            return "ram"
        if tick.visit in self.updates.streamed:
            return self.compute_tier
        # Check the weight first, because it usually decides for a layer of many parts. Plans call this often.
        groups = chain((tick.held,), tick.passing)
        is_there = all(homes[key] == self.compute_tier for group in groups for key, _ in group if key not in tick.spent)
        return self.compute_tier if is_there else "ram"

    def accesses(self, homes: Mapping[str, str]) -> Iterator[Access]:
        """Yield every access of the step, in order."""
        for number, tick in enumerate(self.ticks):
            tier = self.tier_of(tick, homes)
            for key, mode in tick.uses:
                yield Access(number, key, tier, mode)

    def schedule(self, homes: Mapping[str, str], num_steps: int, *, first_step: int = 0) -> Schedule:
        """Return the schedule of ``num_steps`` steps from ``first_step`` on, with the updates that finish them."""
        # Reads at home move nothing. Writes at home count: the prefetcher must not fetch a copy before a write.
        streamed = [access for access in self.accesses(homes) if homes[access.key] != access.tier or access.mode != "r"]
        period = len(self.ticks)
        deferred = [number for number, tick in enumerate(self.ticks) if self._is_deferred(tick)]
        start, end = first_step * period, (first_step + num_steps) * period
        return Schedule(streamed, period, end, start=start, deferred=deferred)


class WeightAccess(Protocol):
    """Interface through which the running model requests the weights of a pass, in program order, on one thread."""

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Advance to the next tick: forward visits in order, the head (by its first visit), backward visits in reverse.

        The model also announces visits that the loss does not depend on, and takes their planned leases without using
        them. The order of ticks and the traffic then depend only on the model, never on data.
        """

    def weights(self, unit: Unit, visit: int) -> AbstractContextManager[Mapping[str, Tensor | MatrixParts]]:
        """Lease a unit's weights, by the owner's full parameter name, in the compute dtype on the compute device.

        The value of a cut weight is a `MatrixParts`.
        """

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Skip a unit's weights, because no token of the step is routed to the unit. Call it instead of ``weights``.

        Planned traffic counts the skipped weights, so it is an upper bound.
        """

    def announce_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Announce which visits, from the current one on, will skip their weights in forward and backward.

        Args:
            visits: Visits of all experts of one layer.
            idle: Visits without a token.
        """


class BlockAccess(WeightAccess, Protocol):
    """Interface through which the running model requests the blocks of one step.

    A unit that is called twice in a forward has two visits. Each visit is a use site with separate accumulators.
    """

    def gradients(self, unit: Unit, visit: int) -> AbstractContextManager[GradientSink]:
        """Lease the gradient accumulators of a unit's trainable parameters at this use site."""

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        """Copy an activation into its block. The block keeps no reference to the caller's tensor."""

    def reuse_activation(self, visit: int, micro_batch: int, index: int, place: tuple[int, int]) -> None:
        """Record that an activation is the tensor at ``place``, an earlier (visit, index), and shares its block."""

    def get_activation(self, visit: int, micro_batch: int, index: int) -> AbstractContextManager[Tensor]:
        """Lease an activation, bit-identical to what was put. The contents are dead after its own visit's lease."""

    def results_block(self, visit: int, micro_batch: int) -> AbstractContextManager[Tensor]:
        """Lease the block of saved results, uint8 [N]. The forward writes it, and the backward reads it once.

        Only visits that save results (``Recompute``) call it, after the activations of the micro-batch.
        """


class MatrixParts(Protocol):
    """Matrix whose rows are stored in several blocks.

    Attributes:
        shape: [rows, columns] of the matrix.
        passes: Whether a tick leases each part once, one at a time. If False, all parts are available.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> Sequence[range]: ...

    @property
    def passes(self) -> bool: ...

    def part(self, number: int, /) -> AbstractContextManager[Tensor]:
        """Lease the rows of part ``number``."""


class GradientSink(Protocol):
    """Gradient accumulators of one use site, in fp32."""

    def at(self, micro_batch: int, /) -> None:
        """Advance to a micro-batch, by its number in this process. The next gradients belong to it.

        Call it in order of the micro-batches. Each ``rows`` context starts again with the first micro-batch.
        """

    def rows_of_parts(self, name: str, /) -> Sequence[range]:
        """Return the rows of each part to fill inside of ``part``, one part at a time; empty if parts do not pass."""
        return ()

    def part(self, name: str, number: int, /) -> AbstractContextManager[None]:
        """Lease a part of a parameter's accumulator. Lease each part once. The head leases its parts in reverse."""
        raise AssertionError(f"{name} has no parts")

    def rows(self, name: str, start: int, stop: int, /) -> AbstractContextManager[None]:
        """Accumulate the products of all micro-batches in these rows of the leased part."""
        raise AssertionError(f"{name} has no parts")

    def add(self, name: str, gradient: Tensor, /) -> None:
        """Accumulate one micro-batch's gradient (compute dtype, parameter's shape). The first of a step overwrites."""

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0, /) -> None:
        """Accumulate the product of two matrices in the rows of a gradient from ``first_row`` on.

        Together, the products of a pass must cover all rows of the gradient.
        """

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, ignored: int | None = None, /) -> None:
        """Accumulate rows of a matrix in order, except rows whose index is ``ignored``."""


def activations_of(program: StepProgram) -> dict[int, set[str]]:
    """Return the keys of the activation blocks of every visit before the head."""
    keys: dict[int, set[str]] = {}
    for tick in program.ticks:
        if tick.phase == "forward":
            keys_of_tick = {
                key for group in tick.passing for key, _ in group if program.blocks[key].kind == "activations"
            }
            keys.setdefault(tick.visit, set()).update(keys_of_tick)
    return keys


def keeping_graphs(program: StepProgram, visits: frozenset[int]) -> StepProgram:
    """Return a copy of the program in which these visits keep their graphs and use no activation blocks."""
    dropped = {key for visit, keys in activations_of(program).items() if visit in visits for key in keys}

    def is_input(group: Group) -> bool:
        return any(program.blocks[key].kind == "activations" for key, _ in group)

    ticks = tuple(
        replace(
            tick,
            passing=tuple(group for group in tick.passing if not is_input(group)),
            spent=tick.spent - dropped,
        )
        if tick.phase in ("forward", "backward") and tick.visit in visits
        else tick
        for tick in program.ticks
    )
    blocks = {key: block for key, block in program.blocks.items() if key not in dropped}
    assert all(key in blocks for tick in ticks for key, _ in tick.uses), "a later visit recomputes from such an input"
    before = program.recompute
    recompute = replace(
        before,
        kept_graphs=before.kept_graphs | visits,
        saved_attention=before.saved_attention - visits,
        saved_results=before.saved_results - visits,
    )
    return replace(program, blocks=blocks, ticks=ticks, recompute=recompute)


def saving_results(
    program: StepProgram, trace: VisitTrace, visits: frozenset[int], *, with_products: bool = False
) -> StepProgram:
    """Return a copy of the program in which these visits save results, in one uint8 block per micro-batch.

    Args:
        visits: Visits that have savable results, save none yet and do not keep their graphs.
        with_products: Whether to save product results in addition to attention results.
    """
    blocks, ticks = dict(program.blocks), list(program.ticks)
    for number, tick in enumerate(ticks):
        if tick.phase in ("forward", "backward") and tick.visit in visits:
            traced = trace.visits[tick.visit]
            ticks[number] = _saving_results(tick, program, len(traced.saved) - len(traced.reused))
            nbytes = (traced.results if with_products else traced.attention).nbytes
            # Add blocks in the order of the tick, because the order of blocks decides ties between homes.
            for key in [key for key in dict(ticks[number].uses) if key not in blocks]:
                blocks[key] = BlockPlan(key, "activations", nbytes, torch.uint8)
    before = program.recompute
    if with_products:
        recompute = replace(before, saved_results=before.saved_results | visits)
    else:
        recompute = replace(before, saved_attention=before.saved_attention | visits)
    return replace(program, blocks=blocks, ticks=tuple(ticks), recompute=recompute)


def _saving_results(tick: Tick, program: StepProgram, num_written: int) -> Tick:
    """Return a copy of a visit's tick that leases the block of results after the inputs of each micro-batch.

    Args:
        num_written: Number of inputs per micro-batch that this forward writes. Earlier visits wrote the rest.
    """
    groups: list[Group] = []
    num_groups = num_written if tick.phase == "forward" else 1
    slots = [slot for slot in range(len(tick.passing)) if activation_key(tick.visit, slot, 0) in program.blocks]
    for slot in slots:
        inputs = tick.passing[slot * num_groups : (slot + 1) * num_groups]
        key = results_key(tick.visit, slot)
        if tick.phase == "forward":
            groups += [*inputs, ((key, "w"),)]
        else:  # the recompute needs inputs and results at the same time
            groups.append((*(use for group in inputs for use in group), (key, "r")))
    others = tick.passing[len(slots) * num_groups :]
    spent = {results_key(tick.visit, slot) for slot in slots} if tick.phase == "backward" else set()
    return replace(tick, passing=(*groups, *others), spent=tick.spent | spent)


def evaluation_program(program: StepProgram) -> StepProgram:
    """Return the program of one evaluation pass. It has only forward and head ticks, and only blocks of weights.

    An encoding can replace the block of a weight by other blocks. The pass leases each unit's weights once, for all of
    its micro-batches. A program of an evaluation pass is returned unchanged.
    """
    passes: dict[tuple[Phase, int, ModelPhase | None], Tick] = {}
    read = {key for encoding in program.encodings.values() for key in encoding.keys}
    for tick in program.ticks:
        if tick.phase in ("forward", "head") or (tick.phase == "gather" and tick.serves != "backward"):
            held, *passing = (
                tuple((key, mode) for key, mode in group if program.blocks[key].kind == "weights" or key in read)
                for group in (tick.held, *tick.passing)
            )
            own = Tick(tick.phase, tick.visit, held, tuple(group for group in passing if group), serves=tick.serves)
            passes.setdefault((tick.phase, tick.visit, tick.serves), own)
    updates = replace(program.updates, are_deferred=False, sent_elements={})
    return replace(program, ticks=tuple(passes.values()), updates=updates, occupants={})


def reading_averages(program: StepProgram, graph: ModelGraph, kind: str) -> StepProgram:
    """Return a program whose passes read averages instead of weights, and round them to the compute dtype.

    Each block of a weight is replaced by a block of its average, or, if only the average is cut, by all blocks of the
    average. Layouts without an average keep their weights.
    """
    encodings, read = dict(program.encodings), dict[str, Group]()
    for layout in graph.layouts.values():
        found = program.state_keys(layout, kind)
        if found[0] in program.blocks:
            weights = program.weight_keys(layout)
            of_weights = [(key,) for key in found] if len(found) == len(weights) else [tuple(found)]
            read.update((key, tuple((each, "r") for each in own)) for key, own in zip(weights, of_weights, strict=True))
            nbytes = layout.num_elements * program.blocks[found[0]].dtype.itemsize
            encodings[layout.name] = AveragedWeight(tuple(found), nbytes, graph.dtype)

    def reading(group: Group) -> Group:
        return tuple(use for key, mode in group for use in read.get(key, ((key, mode),)))

    ticks = tuple(
        replace(tick, held=reading(tick.held), passing=tuple(reading(group) for group in tick.passing))
        for tick in program.ticks
    )
    blocks = {key: block for key, block in program.blocks.items() if block.kind in DURABLE_KINDS}
    return replace(program, blocks=blocks, ticks=ticks, encodings=encodings)


class ProgramBuilder:
    """Builder of the program of a step, from a model's units and the trace of their visits.

    Args:
        trace: Visits of one forward, with the tensors that each visit saves for its backward.
        order: ``layer`` (all micro-batches of a layer before the next layer) or ``micro_batch``.
        optimizer: Optimizer that defines the kinds of state; None if no weights are updated.
        grad_dtype: Dtype of stored gradients.
        updates: Time and tier of updates. The builder adds the traffic of updates outside of blocks.
        frozen: Sources of weights that are not trained.
        sharding: This rank's share of the step. Several ranks need the order ``layer``.
    """

    def __init__(
        self,
        graph: ModelGraph,
        trace: VisitTrace,
        *,
        num_micro_batches: int,
        order: Literal["layer", "micro_batch"],
        compute_tier: str,
        optimizer: Optimizer | None,
        grad_dtype: torch.dtype = torch.float32,
        updates: GroupUpdates | None = None,
        frozen: FrozenWeights | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self._sharding, self._frozen = sharding or Sharding(), frozen or FrozenWeights()
        self._shards, own_lanes = self._sharding.shards, self._sharding.own_lanes
        assert self._shards.are_whole or (order == "layer" and not self._frozen.in_place), self._shards
        assert order == "layer" or own_lanes.num_lanes == 1, "the sum of a lane is open for only one visit at a time"
        self._graph, self._trace = graph, trace
        self._num_micro_batches, self._order = num_micro_batches, order
        self._compute_tier, self._grad_dtype = compute_tier, grad_dtype
        state_kinds = () if optimizer is None else optimizer.state_kinds(graph.dtype.itemsize == 2)
        self._state_kinds = [kind for kind in state_kinds if kind.name != "weight"]
        self._uses = uses_of_layouts(graph, trace)

        # State that is not elementwise needs whole parameters, so its layout cannot be cut into parts.
        def is_elementwise(layout: UnitLayout) -> bool:
            return all(kind.is_like_weight(layout) for kind in state_kinds)

        self._parts = {
            layout.name: layout.parts
            for layout in graph.layouts.values()
            if is_elementwise(layout) and len(layout.parts) > 1 and self._is_trained(layout)
        }
        self._updates = self._with_traffic(updates or GroupUpdates(), optimizer, is_elementwise)
        # Shard each part, so that a rank's blocks of weight, state and gradient hold the same elements.
        self._cut_weights = frozenset(
            name
            for name in self._parts
            if not self._shards.are_whole or all(self._accepts_parts(visit, name) for visit in self._uses[name])
        )
        # While a device computes, the host updates the weights of the next forward visit. During the backward, it
        # updates the weights of the visit whose backward has just ended.
        self._lead = int(compute_tier != "ram" and self._updates.overlaps_device)
        self._passing: frozenset[tuple[int, str]] = frozenset()

    def build(self, *, passing_parts: bool = False) -> StepProgram:
        """Return the program.

        Args:
            passing_parts: Whether to lease the parts of gradients and cut weights one at a time where possible. Results
                stay bit-identical, but the head computes more logits a second time.
        """
        self._passing = frozenset(
            (visit, layout)
            for layout in (self._parts if passing_parts else ())
            for visit in self._uses[layout]
            if self._accepts_parts(visit, layout)
        )
        blocks = {block.key: block for block in (*self._parameter_blocks(), *self._activation_blocks())}
        return StepProgram(
            blocks,
            tuple(self._ticks()),
            self._compute_tier,
            cuts=Cuts(self._parts, self._cut_weights, self._passing),
            updates=self._updates,
            sharding=self._sharding,
            encodings=self._frozen.encodings,
        )

    def _with_traffic(
        self, updates: GroupUpdates, optimizer: Optimizer | None, is_elementwise: Callable[[UnitLayout], bool]
    ) -> GroupUpdates:
        """Return ``updates`` with the traffic of matrix updates outside of blocks."""
        trained = {
            index: layout for index, layout in enumerate(self._graph.layouts.values()) if self._is_trained(layout)
        }
        assert self._shards.are_whole or all(map(is_elementwise, trained.values())), "shards suffice only elementwise"
        if not isinstance(optimizer, MatrixOptimizer) or self._compute_tier == "ram":
            return updates
        sent = {index: matrix_elements(optimizer, layout) for index, layout in trained.items()}
        return replace(updates, sent_elements=sent)

    # -- blocks ------------------------------------------------------------------------------------------------

    def _parameter_blocks(self) -> Iterator[BlockPlan]:
        for layout in self._graph.layouts.values():
            in_folder = self._frozen.in_folder and not layout.trainable
            if layout.name in self._cut_weights:
                key = weight_key(layout.name)
                yield from self._blocks_of(layout, key, "weights", layout.num_elements, self._graph.dtype)
            else:
                yield weight_block(
                    layout,
                    self._shards.num_elements(range(layout.num_elements)),
                    self._graph.dtype,
                    self._frozen.encodings.get(layout.name),
                    in_folder=in_folder,
                    in_place=layout.name in self._frozen.in_place,
                )
            if not self._is_trained(layout):
                continue
            for kind in self._state_kinds:
                key = state_key(layout.name, kind.name)
                length = layout.num_elements if kind.elements_of is None else kind.num_elements(layout)
                for block in self._blocks_of(layout, key, "optimizer", length, kind.dtype):
                    yield replace(block, num_elements=kind.elements_for(block.num_elements))
            for use in range(len(self._uses[layout.name])):
                key = gradient_key(layout.name, use)
                yield from self._blocks_of(layout, key, "gradients", layout.num_elements, self._grad_dtype)

    def _blocks_of(
        self, layout: UnitLayout, key: str, kind: Kind, num_elements: int, dtype: torch.dtype
    ) -> Iterator[BlockPlan]:
        parts = self._parts.get(layout.name) or (range(num_elements),)
        sizes = [self._shards.num_elements(part) for part in parts]
        for part, size in zip(part_keys(key, len(sizes)), sizes, strict=True):
            yield BlockPlan(part, kind, size, dtype, key if len(sizes) > 1 else "")

    def _part_keys(self, key: str, layout: str) -> list[str]:
        return part_keys(key, len(self._parts.get(layout, ())) or 1)

    def _activation_blocks(self) -> Iterator[BlockPlan]:
        for visit, traced in enumerate(self._trace.visits):
            for micro_batch in range(self._num_micro_batches):
                for index, (shape, dtype) in enumerate(traced.saved):
                    if index in traced.reused:
                        continue
                    key = activation_key(visit, self._slot_of(micro_batch), index)
                    yield BlockPlan(key, "activations", torch.Size(shape).numel(), dtype)

    def _is_trained(self, layout: UnitLayout) -> bool:
        """Return whether a layout has gradients and state, because it is trainable and the model calls its module."""
        return layout.trainable and bool(self._uses[layout.name])

    def _slot_of(self, micro_batch: int) -> int:
        """Return the number of a micro-batch's set of activation blocks; 0 if micro-batches run one at a time."""
        return micro_batch if self._order == "layer" else 0

    # -- ticks -------------------------------------------------------------------------------------------------

    def _ticks(self) -> Iterator[Tick]:
        everything = list(range(self._num_micro_batches))
        groups = [everything] if self._order == "layer" else [[micro_batch] for micro_batch in everything]
        for number, group in enumerate(groups):
            is_first, is_last = number == 0, number == len(groups) - 1
            ticks: Iterable[Tick] = self._pass(group, is_first=is_first, is_last=is_last)
            if not self._shards.are_whole:
                ticks = self._with_collectives(list(ticks))
            if is_first and self._updates.are_deferred:
                ticks = self._with_deferred_updates(list(ticks))
            if is_last and not self._updates.are_deferred:
                ticks = self._with_updates(ticks)
            yield from ticks

    def _with_collectives(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Yield the ticks without their held blocks, with gather ticks before and exchange ticks after them.

        Ticks keep their passing blocks: activations, and parts, which they gather and exchange themselves.
        """
        weights = [_blocks_of_kind("weight", tick.held) for tick in ticks]
        for gathers, tick in zip(gathers_before(ticks, weights, self._sharding.gathers_ahead), ticks, strict=True):
            yield from gathers
            passing = tuple(group for group in tick.passing if not _is_added_to_held(group))
            yield replace(tick, held=(), passing=passing, spent=self._spent(passing) & tick.spent)
            if gradients := _blocks_of_kind("grad", tick.held):
                summed = tuple(self._exchanged(gradients))
                yield Tick("exchange", tick.visit, (), summed, self._spent(summed), _model_phase(tick))

    def _exchanged(self, gradients: Group) -> Iterator[Group]:
        """Yield each accumulator of a use site. At the first site, also yield the other sites' accumulators to add."""
        others: dict[str, Group] = {}
        for name, uses in self._uses.items():
            keys = [self._part_keys(gradient_key(name, use), name) for use in range(len(uses))]
            others.update((own, tuple((key, "r") for key in rest)) for own, *rest in zip(*keys, strict=True))
        for key, mode in gradients:
            yield ((key, mode), *others.get(key, ()))

    def _with_updates(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Yield the ticks of the last pass, with each update after the tick that completes its gradient."""
        waiting: deque[list[Tick]] = deque([] for _ in range(self._lead))
        for tick in ticks:
            yield tick
            filled = {key for key, mode in tick.uses if mode != "r"}
            # The backward reaches the first use site of a shared layout last, and adds the other gradients there.
            updates = [
                self._update(index, layout)
                for index, layout in enumerate(self._graph.layouts.values())
                if self._is_trained(layout) and self._part_keys(gradient_key(layout.name, 0), layout.name)[0] in filled
            ]
            waiting.append(updates)
            yield from waiting.popleft()
        for updates in waiting:
            yield from updates

    def _with_deferred_updates(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Yield the ticks of the first pass. Deferred updates come ``_lead`` ticks before the weight's first use."""
        updates: dict[int, list[Tick]] = {}
        for index, layout in enumerate(self._graph.layouts.values()):
            if self._is_trained(layout):
                weight = self._weight_keys(layout.name)[0]
                first = next(n for n, tick in enumerate(ticks) if weight in dict(tick.uses))
                updates.setdefault(max(0, first - self._lead), []).append(self._update(index, layout))
        for number, tick in enumerate(ticks):
            yield from updates.get(number, ())
            yield tick

    def _pass(self, group: Sequence[int], *, is_first: bool, is_last: bool) -> Iterator[Tick]:
        """Yield the ticks of forward, head and backward over one group of micro-batches."""
        trunk = [visit for visit in range(len(self._trace.visits)) if not self._trace.visits[visit].is_head]
        head = [visit for visit in range(len(self._trace.visits)) if self._trace.visits[visit].is_head]
        for visit in trunk:
            passing = (*self._passing_weights(visit), *self._activations(visit, group, "w"))
            yield Tick("forward", visit, self._weights(visit), passing)
        if head:
            held = [item for visit in head for item in self._weights(visit)]
            weights = [item for visit in head for item in self._passing_weights(visit)]
            if weights:  # two passes over the parts, for the loss and for the gradients
                yield Tick("head", head[0], tuple(dict(held).items()), tuple(weights))
            held += [item for visit in head for item in self._gradients(visit, is_first=is_first)]
            summed = self._passing_gradients(head, is_first=is_first, is_last=is_last)
            spent = self._spent(summed)
            if weights:
                summed = tuple((*weight, *group) for weight, group in zip(reversed(weights), summed, strict=True))
            yield Tick("head", head[0], tuple(dict(held).items()), summed, spent)
        for visit in reversed(trunk):
            activations = self._activations(visit, group, "r")
            has_backward = self._trace.visits[visit].has_backward
            weights = list(self._passing_weights(visit)) if has_backward else []
            summed = self._passing_gradients([visit], is_first=is_first, is_last=is_last)
            yield Tick(
                "backward",
                visit,
                (self._weights(visit) if has_backward else ()) + self._gradients(visit, is_first=is_first),
                (*weights, *activations, *summed),
                self._spent((*activations, *summed)) - self._reused(visit, group),
            )

    @staticmethod
    def _spent(passing: Iterable[Group]) -> frozenset[str]:
        """Return the keys with contents that are dead after the read: activations and added gradients."""
        return frozenset(key for group in passing for key, mode in group if mode == "r")

    def _update(self, index: int, layout: UnitLayout) -> Tick:
        weights: Group = tuple((key, "rw") for key in self._weight_keys(layout.name))
        gradients = self._part_keys(gradient_key(layout.name, 0), layout.name)
        states = [self._part_keys(state_key(layout.name, kind.name), layout.name) for kind in self._state_kinds]
        groups: list[Group] = [
            (*((key, "rw") for key in keys), (gradient, "r"))
            for gradient, *keys in zip(gradients, *states, strict=True)
        ]
        spent = frozenset(gradients)
        if len(groups) == 1:
            return Tick("update", index, (*weights, *groups[0]), spent=spent)
        if layout.name in self._cut_weights:
            groups = [(weight, *group) for weight, group in zip(weights, groups, strict=True)]
            return Tick("update", index, (), tuple(groups), spent)
        return Tick("update", index, weights, tuple(groups), spent)

    def _weights(self, visit: int) -> Group:
        """Return the weights that a visit holds."""
        return tuple(
            (key, "r")
            for name in self._layouts_of(visit)
            if not self._passes_weight(visit, name)
            for key in self._weight_keys(name)
        )

    def _passing_weights(self, visit: int) -> tuple[Group, ...]:
        """Return the parts of weights that a visit leases one at a time."""
        names = [name for name in self._layouts_of(visit) if self._passes_weight(visit, name)]
        return tuple(((key, "r"),) for name in names for key in self._weight_keys(name))

    def _passes_weight(self, visit: int, layout: str) -> bool:
        return layout in self._cut_weights and self._leases_by_part(visit, layout)

    def _weight_keys(self, layout: str) -> list[str]:
        key = weight_key(layout)
        return self._part_keys(key, layout) if layout in self._cut_weights else [key]

    def _gradients(self, visit: int, *, is_first: bool) -> Group:
        """Return the accumulators that a visit holds."""
        return tuple(
            (key, "w" if is_first else "rw")
            for name in self._trained_layouts_of(visit)
            if not self._leases_by_part(visit, name)
            for key in self._part_keys(gradient_key(name, self._uses[name].index(visit)), name)
        )

    def _passing_gradients(self, visits: Sequence[int], *, is_first: bool, is_last: bool) -> tuple[Group, ...]:
        """Return the accumulators that the visits lease part by part, with the other use sites' accumulators to add.

        The backward fills the first use site last, and adds all other sites to it.
        """
        groups: list[Group] = []
        for visit in visits:
            for name in self._trained_layouts_of(visit):
                uses = self._uses[name]
                others = range(1, len(uses)) if is_last and uses[0] == visit else ()
                of_parts = zip(*(self._part_keys(gradient_key(name, use), name) for use in others), strict=True)
                summed: list[Group] = [tuple((key, "r") for key in keys) for keys in of_parts]
                if self._leases_by_part(visit, name):
                    own = self._part_keys(gradient_key(name, uses.index(visit)), name)
                    summed = [
                        ((key, "w" if is_first else "rw"), *group)
                        for key, group in zip(own, summed or [()] * len(own), strict=True)
                    ]
                    if self._trace.visits[visit].is_head:  # its second pass runs in reverse
                        summed.reverse()
                groups += summed
        return tuple(groups)

    def _leases_by_part(self, visit: int, layout: str) -> bool:
        """Return whether a visit leases the parts of a layout one at a time."""
        return (visit, layout) in self._passing

    def _accepts_parts(self, visit: int, layout: str) -> bool:
        if layout not in self._parts or not self._graph.layouts[layout].first_rows:
            return False
        return self._graph.layouts[layout].entries[0].name in self._trace.visits[visit].by_part

    def _trained_layouts_of(self, visit: int) -> list[str]:
        return [name for name in self._layouts_of(visit) if self._graph.layouts[name].trainable]

    def _activations(self, visit: int, group: Sequence[int], mode: Mode) -> tuple[Group, ...]:
        """Return the activations that a visit writes or reads. A reused tensor is in the block of an earlier visit.

        The forward leases each activation separately. The recompute of a micro-batch leases its activations together.
        """
        traced = self._trace.visits[visit]
        places = [
            traced.reused.get(index, (visit, index))
            for index in range(len(traced.saved))
            if mode == "r" or index not in traced.reused
        ]
        keys = [[activation_key(at, self._slot_of(m), index) for at, index in places] for m in group if places]
        if mode == "r":
            return tuple(tuple((key, mode) for key in own) for own in keys)
        return tuple(((key, mode),) for own in keys for key in own)

    def _reused(self, visit: int, group: Sequence[int]) -> frozenset[str]:
        """Return the activations that a visit reads but that visits earlier in the forward still need."""
        places = self._trace.visits[visit].reused.values()
        return frozenset(activation_key(at, self._slot_of(m), index) for m in group for at, index in places)

    def _layouts_of(self, visit: int) -> tuple[str, ...]:
        return layouts_of_unit(self._graph, self._trace.visits[visit].unit)


def gathers_before(ticks: Sequence[Tick], weights: Sequence[Group], ahead: int) -> Iterator[list[Tick]]:
    """Yield, for each tick of a pass, the gather ticks that precede it.

    Args:
        ticks: Forward, head and backward ticks in order.
        ahead: Number of ticks by which a gather precedes the tick that needs its weight.
    """
    waiting = deque(
        Tick("gather", tick.visit, own, serves=_model_phase(tick)) for tick, own in zip(ticks, weights, strict=True)
    )
    for number in range(len(ticks)):
        due: list[Tick] = []
        while waiting and len(ticks) - len(waiting) <= number + ahead:
            gather = waiting.popleft()
            if gather.held:
                due.append(gather)
        yield due


def _blocks_of_kind(kind: str, group: Group) -> Group:
    """Return the blocks of a group whose kind is ``weight`` or ``grad``."""
    return tuple((key, mode) for key, mode in group if kind_of_key(key) == kind)


def _is_added_to_held(group: Group) -> bool:
    """Return whether a group has only gradients of other use sites, to be added to a held gradient."""
    gradients = _blocks_of_kind("grad", group)
    return bool(gradients) and all(mode == "r" for _, mode in gradients)


def _model_phase(tick: Tick) -> ModelPhase:
    assert tick.phase in ("forward", "head", "backward"), tick
    return tick.phase


def layouts_of_unit(graph: ModelGraph, unit: int) -> tuple[str, ...]:
    """Return the names of the layouts whose parameters a unit uses, in order and without duplicates."""
    return tuple(dict.fromkeys(layout for _, _, layout in graph.units[unit].params))


def uses_of_layouts(graph: ModelGraph, trace: VisitTrace) -> dict[str, list[int]]:
    """Return the use sites of every layout: the visits that use it, in forward order."""
    uses: dict[str, list[int]] = {name: [] for name in graph.layouts}
    for visit, traced in enumerate(trace.visits):
        for name in layouts_of_unit(graph, traced.unit):
            uses[name].append(visit)
    return uses


def weight_block(
    layout: UnitLayout,
    num_elements: int,
    dtype: torch.dtype,
    encoding: Encoding | None,
    *,
    in_folder: bool,
    in_place: bool,
) -> BlockPlan:
    """Return the block of a weight that is not cut into parts.

    Args:
        num_elements: Number of elements in the layout, or in a rank's shard of it.
        encoding: Encoding of the weight; None if the block holds the weight itself.
        in_place: Whether uses can read the weight from the model folder, if the folder has it.
    """
    return BlockPlan(
        weight_key(layout.name),
        "weights",
        num_elements if encoding is None else encoding.nbytes,
        dtype if encoding is None else torch.uint8,
        in_folder=in_folder,
        in_place=in_folder and in_place,
        num_packed=0 if encoding is None else layout.num_elements,
    )


def decoded_bytes(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return the largest number of bytes that one visit needs to decode weights. The head counts as one visit."""

    def bytes_of_visit(visit: int, unit: int) -> int:
        return sum(program.decoded_bytes(visit, graph.layouts[name]) for name in layouts_of_unit(graph, unit))

    by_visit = [bytes_of_visit(number, visit.unit) for number, visit in enumerate(trace.visits)]
    head = sum(nbytes for nbytes, visit in zip(by_visit, trace.visits, strict=True) if visit.is_head)
    return max([head, *by_visit])


def weight_key(layout: str) -> str:
    return f"{layout}/weight"


def layout_of_key(key: str) -> str:
    """Return the layout of a block of weight, state or gradients, given the common key of all parts."""
    return key.rpartition("/")[0]


def state_key(layout: str, state: str) -> str:
    return f"{layout}/{state}"


def gradient_key(layout: str, use: int) -> str:
    return f"{layout}/grad.{use}"


def part_keys(key: str, num_parts: int) -> list[str]:
    """Return the keys of the parts of ``key``, or the key itself if there is one part."""
    return [key] if num_parts == 1 else [f"{key}.{part}" for part in range(num_parts)]


def stored_keys(key: str, stored: Container[str]) -> list[str]:
    """Return ``key``, or the keys of its parts in order, if blocks with these keys are stored; otherwise empty."""
    if key in stored:
        return [key]
    return list(takewhile(stored.__contains__, (f"{key}.{part}" for part in count())))


def kind_of_key(key: str) -> str:
    """Return the kind in a block's key, without the part: ``weight``, ``low``, ``m``, ``grad`` and so on."""
    return key.rpartition("/")[2].partition(".")[0]


def activation_key(visit: int, micro_batch: int, index: int) -> str:
    return f"activations/{visit}/{micro_batch}.{index}"


def results_key(visit: int, micro_batch: int) -> str:
    return f"activations/{visit}/{micro_batch}.results"


def cache_key(visit: int, micro_batch: int) -> str:
    return f"cache/{visit}/{micro_batch}"
