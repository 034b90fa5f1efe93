"""Program of one training step: its blocks, its ticks in order, and the blocks that each tick uses.

Every call of a unit in a forward is a *visit*. A step has one tick for each visit's forward, one for the head, one for
each visit's backward, and one for the update of each group of weights:

    update 0, forward 0, update 1, forward 1, ..., head, ..., backward 1, backward 0

With several ranks, each block holds a shard (`ranks/shards.py`). Visits then have gather ticks before them and exchange
ticks after them:

    update 0, gather 0, forward 0, ..., gather 0, backward 0, exchange 0

A trace (`trace.py`) lists the units that a model visits and the tensors that each visit saves for its backward.
`ProgramBuilder` turns the trace into a program. The planner reads the program to count bytes and to choose a home for
every block. From the program and the homes, `tape.compile_step` derives the leases of a step. The running model
requests the leases through `BlockAccess`.
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
from megatrain.engine.saved_results import NOT_SAVABLE, SavableResults
from megatrain.engine.unneeded import NOTHING_UNNEEDED, SkippedProducts
from megatrain.engine.work import NO_WORK, Work
from megatrain.optim.base import MatrixOptimizer
from megatrain.optim.matrices import DIRECTION_BYTES, matrix_elements
from megatrain.ranks.shards import NETWORK, PEER, Sharding, peer_links
from tiered import Access, BlockRecord, Mode, Schedule
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
    "LayoutSplits",
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
    """Device memory that one visit uses for one micro-batch, not counting blocks.

    Attributes:
        held_nbytes: Bytes in use when the visit starts: hidden states, masks and tables, but no weights or gradients.
        stays_nbytes: Portion of `held_nbytes` that stays in use until the backward: masks, tables, ids, and tensors
            that autograd saves between visits. In layer order each micro-batch holds this portion once. It holds the
            rest of `held_nbytes` twice, for the current visit and for the next visit.
        forward_nbytes: Peak memory beyond `held_nbytes` between the start of this visit and the next visit.
        backward_nbytes: Peak memory of recompute and backward beyond `held_nbytes`, including parameter gradients.
        graph_nbytes: Size of the forward's graph, if the graph is kept for the backward. Counts inputs, tensors saved
            by autograd, and weights cast to another dtype, but neither the weights nor tensors that visits share.
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
        has_backward: Whether the unit has a backward. It has none if the loss does not depend on its output, or if no
            parameter up to its output is trained. The backward still announces the visit, but leases no weights for it.
        saved: `(shape, dtype)` of every activation that is kept in a block until the backward.
        reused: Maps an input's index to the (visit, index) of an earlier activation that is the same tensor. Both use
            one block.
        chance_of_no_token: Probability that one token is not routed to the visit's experts, assuming uniform routing.
        backward: Work that recompute and backward execute; `NO_WORK` for visits of the head.
        by_part: Names of parameters that the visit can process one part at a time, both weight and gradient.
        attention: Attention results that can be saved for the recompute.
        results: Attention results and matmul results that can be saved for the recompute.
    """

    unit: int
    is_head: bool
    has_backward: bool
    saved: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    memory: VisitMemory
    forward: Work = NO_WORK
    backward: Work = NO_WORK
    by_part: frozenset[str] = frozenset()
    attention: SavableResults = NOT_SAVABLE
    results: SavableResults = NOT_SAVABLE
    reused: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    chance_of_no_token: float = 0.0
    unneeded: SkippedProducts = NOTHING_UNNEEDED

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward recomputes the unit if the unit's graph is not kept."""
        return self.has_backward and not self.is_head

    @property
    def recompute(self) -> Work:
        """Work of the recompute, or `NO_WORK` if there is no recompute. `backward` includes this work."""
        return self.forward - self.unneeded.work if self.is_recomputed else NO_WORK


@dataclass(frozen=True, slots=True)
class VisitTrace:
    """Visits of one forward in order. The visits of the head come last.

    Attributes:
        head_nbytes: Peak memory of the head phase for one micro-batch, not counting held bytes. Counts one piece of
            logits, the piece's gradients, and the gradient of the trunk's output.
        head_rows: Number of rows whose logits are computed together; 0 if the head is not chunked.
        head_columns: Number of vocabulary columns computed together; 0 for the whole vocabulary.
        head_part_nbytes: Size of the graph that the head keeps for one vocabulary part. ``head_nbytes`` includes the
            graph of one part.
        guesses: One sentence for each value that the trace guessed. If there are guesses, the counts are estimates.
        uncounted: Operators without a FLOP formula, with reasons. Byte counts do not depend on FLOP formulas.
        head: Work of the head's forward and backward if every token has a label and each logit is computed once.
        logits_flops: FLOPs needed to compute all logits once. The second pass recomputes the logits that were not kept.
        dense_masks: Reasons why the model builds [S, S] masks. Their memory grows with the square of the row length.
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
        """Whether byte counts are exact, because no value was guessed."""
        return not self.guesses


#: Phases that the running model announces. Ticks of other phases come between the announced ticks.
ModelPhase = Literal["forward", "head", "backward"]
Phase = Literal["forward", "head", "backward", "update", "gather", "exchange"]
Kind = Literal["weights", "optimizer", "gradients", "activations"]

#: Maps the (tick, key) of a use to the tick of the block's next use. The copy stays pinned until the next use. If the
#: next use has no later tick than the first use, it belongs to the next step.
Stays = Mapping[tuple[int, str], int]

#: Blocks that are leased together, as (key, mode) pairs.
Group = tuple[tuple[str, Mode], ...]

_DECODED_ALIGNMENT_BYTES = 64

#: Kinds of blocks whose contents outlive a step. Checkpoints hold these.
DURABLE_KINDS: tuple[Kind, ...] = ("weights", "optimizer")

#: Kinds in display order. If two kinds save the same number of bytes, the first kind gets the faster tier.
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Description of a block, which is a flat tensor with ``num_elements`` elements.

    Attributes:
        part_of: Key that all parts of a tensor have in common, if the block is a part; otherwise empty.
        in_folder: Whether the model folder has the contents and no step writes the block. Checkpoints omit the block.
        in_place: Whether the model folder can be the home of the block, because uses can read the block there.
        num_packed: Number of elements after decoding, if the block holds packed bytes; otherwise 0.
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
        """Key that all parts have in common, or the block's own key if the block is not a part."""
        return self.part_of or self.key

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def num_values(self) -> int:
        """Number of elements after decoding."""
        return self.num_packed or self.num_elements

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints contain the block."""
        return self.kind in DURABLE_KINDS and not self.in_folder


@dataclass(frozen=True, slots=True)
class Tick:
    """One position in a step, with the blocks used there.

    Attributes:
        phase: Updates run in the tier that ``StepProgram.tier_of`` returns. All other phases run in the compute tier.
        visit: Index of the layout for ``update``, or number of the visit for other phases.
        held: Blocks that are leased together for the whole tick.
        passing: Groups of blocks. The tick leases one group at a time. A group is an activation of a micro-batch,
            or one part of a layout's state and gradient.
        spent: Keys of blocks that no later tick reads. Their copies are discarded, never written back.
        serves: Phase for which a ``gather`` or ``exchange`` tick moves weights or gradients; None for other ticks.
            Passing parts are gathered and exchanged within the visit's own tick.
    """

    phase: Phase
    visit: int
    held: Group
    passing: tuple[Group, ...] = ()
    spent: frozenset[str] = frozenset()
    serves: ModelPhase | None = None

    @property
    def uses(self) -> Group:
        """All blocks of the tick, in lease order."""
        return (*self.held, *(use for group in self.passing for use in group))


@dataclass(frozen=True, slots=True)
class LayoutSplits:
    """Division of layouts into blocks.

    Attributes:
        parts: Maps each layout with several parts to the parts' element ranges. Each kind of state and the gradient
            have one block per part.
        weights: Layouts whose weight also has one block per part. Either all visits accept parts, or ranks own shards.
        passing: Pairs (visit, layout). The visit leases the layout's gradient, and its cut weight, one part at a time.
    """

    parts: Mapping[str, Sequence[range]] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    passing: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Recompute:
    """Choice of forward results that a step keeps so that the backward recomputes less.

    The choice does not change the results of the step. A visit is in at most one of the first three sets.

    Attributes:
        kept_graphs: Visits whose graphs are kept for the backward. Their inputs have no blocks.
        saved_attention: Visits that save attention results in blocks.
        saved_results: Visits that save attention results and matmul results in blocks.
        kept_parts: Number of vocabulary parts whose logits the head keeps for its second pass.
    """

    kept_graphs: frozenset[int] = frozenset()
    saved_attention: frozenset[int] = frozenset()
    saved_results: frozenset[int] = frozenset()
    kept_parts: int = 1

    def savable(self, number: int, visit: TracedVisit) -> SavableResults:
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
    """Settings of weight updates: when they run, in which tier, and what they move in addition to blocks.

    Layouts are identified by index.

    Attributes:
        are_deferred: Whether the next step runs the updates, because they need the gradient norm of the whole step.
        in_compute_tier: Whether the optimizer can update blocks in the compute tier.
        overlaps_device: Whether the host updates a layer while a device computes the next layer. If updates are not
            deferred, the overlap needs memory for the gradients of one more layer.
        streamed: Layouts updated in the compute tier, wherever their blocks have their homes. The update fetches one
            part at a time and writes it back.
        sent_elements: Number of matrix elements, by layout, that an update in RAM sends to the compute device and back.
    """

    are_deferred: bool = True
    in_compute_tier: bool = False
    overlaps_device: bool = True
    streamed: frozenset[int] = frozenset()
    sent_elements: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Sources of frozen weights.

    Attributes:
        in_folder: Whether the model folder has the frozen weights. Checkpoints then omit them.
        in_place: Names of layouts that can stay in the model folder. Each use reads their weights from there.
        encodings: Encodings of weights whose blocks do not hold the weight itself, by layout.
    """

    in_folder: bool = False
    in_place: Collection[str] = ()
    encodings: Mapping[str, Encoding] = field(default_factory=dict)


@dataclass(frozen=True)
class StepProgram:
    """All blocks and ticks of a step. Ticks are numbered by their position.

    Deferred ``update`` ticks finish the previous step, because clipping needs the norm of all its gradients. Each group
    is updated just before the first forward that reads its weights. The first step runs no deferred updates. After the
    last step, a tape with only the deferred updates runs. An update that is not deferred runs after the backward that
    completes its gradient.

    Attributes:
        encodings: Encodings of weights whose blocks do not hold the weight itself, by layout. Each visit decodes them.
        occupants: Maps (tick, key) to the gradient that a shared block holds in that tick (``sharing.py``).
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

    def parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the element range of each part of a layout."""
        return self.cuts.parts.get(layout.name) or (range(layout.num_elements),)

    def owned_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the range of elements that this rank owns in each part of a layout's state and gradient."""
        return [self.sharding.shards.owned(part) for part in self.parts_of(layout)]

    def weight_keys(self, layout: UnitLayout) -> list[str]:
        """Return the keys of the blocks that hold a weight or its encoding."""
        encoding = self.encodings.get(layout.name)
        if encoding is not None and encoding.keys:
            return list(encoding.keys)
        return part_keys(weight_key(layout.name), len(self.weight_parts_of(layout)))

    def weight_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the element range for each block of a layout's weight. With ranks, a block holds a shard of it."""
        encoding = self.encodings.get(layout.name)
        is_cut = layout.name in self.cuts.weights or (encoding is not None and bool(encoding.keys))
        return self.parts_of(layout) if is_cut else (range(layout.num_elements),)

    def decoded_bytes(self, visit: int, layout: UnitLayout) -> int:
        """Return the memory in bytes for a weight that a visit decodes; 0 if the blocks hold the weight itself."""
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
        """Return the dtype in which ranks gather a block. Averages are rounded to this dtype before the gather."""
        block = self.blocks[key]
        return block.dtype if block.kind == "weights" else self.encodings[layout_of_key(block.whole)].dtype

    def gathered_bytes(self, key: str) -> int:
        """Return how many bytes a rank sends to each other rank when a block is gathered."""
        return self.blocks[key].num_elements * self.gathered_dtype(key).itemsize

    def owned_weight_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the range of elements that this rank owns in each block of a layout's weight."""
        return [self.sharding.shards.owned(part) for part in self.weight_parts_of(layout)]

    def full_elements(self, layout: UnitLayout) -> int:
        """Return how many elements a full copy of a layout's weight or gradient has, including shard padding."""
        return max(self.sharding.shards.gathered(part).stop for part in self.parts_of(layout))

    def links_between_ranks(self) -> list[str]:
        """Return the names of the links to and from other ranks."""
        lanes = self.sharding.lanes
        return peer_links(self.compute_tier, lanes.size, lanes.num_hosts)

    def bytes_outside_blocks(self, number: int) -> dict[str, int]:
        """Return how many bytes the tick at position ``number`` moves in addition to blocks, by link.

        An update can send matrices to the compute device and back. Other ticks gather weights and exchange gradients.
        """
        tick, moved = self.ticks[number], dict[str, int]()
        if tick.phase == "update" and (sent := self.updates.sent_elements.get(tick.visit)):
            moved = dict.fromkeys((f"ram->{self.compute_tier}", f"{self.compute_tier}->ram"), DIRECTION_BYTES * sent)
        return moved if self.sharding.shards.are_whole else moved | self._collective_bytes(number)

    def _collective_bytes(self, number: int) -> dict[str, int]:
        """Return how many bytes the tick at position ``number`` sends to and receives from other ranks, by link."""
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
        """Return whether ranks gather a block before the model reads it. False for activations and gradients."""
        return self.blocks[key].kind in DURABLE_KINDS

    def _count_collectives(self, moved: dict[str, int], shard: int, *, is_gather: bool) -> None:
        """Add the bytes that one collective sends and receives, for shards that have ``shard`` bytes each."""
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
        """Return the keys of the blocks for one kind of a layout's state, in order of the parts."""
        return part_keys(state_key(layout.name, state), len(self.parts_of(layout)))

    def gradient_keys(self, layout: UnitLayout, use: int) -> list[str]:
        """Return the keys of a use site's gradient accumulators, in order of the parts."""
        return part_keys(gradient_key(layout.name, use), len(self.parts_of(layout)))

    def contents(self, tick: int, key: str) -> BlockPlan:
        """Return the contents of the block ``key`` in a tick: the block itself, or a gradient that shares its memory.

        Args:
            tick: Position of a tick that uses the block.
        """
        return self.occupants.get((tick, key)) or self.blocks[key]

    def chosen_ticks(self, *, updates: bool = True, passes: bool = True) -> dict[int, Tick]:
        """Return chosen ticks of a step in order, by position.

        Args:
            updates: Whether to include the deferred updates, which finish the previous step.
            passes: Whether to include all other ticks.
        """
        return {n: tick for n, tick in enumerate(self.ticks) if (updates if self._is_deferred(tick) else passes)}

    def _is_deferred(self, tick: Tick) -> bool:
        return self.updates.are_deferred and tick.phase == "update"

    def tier_of(self, tick: Tick, homes: Mapping[str, str]) -> str:
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
        # Check the weight first: in a layer with many parts it usually settles the answer. Plans call this often.
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
        """Return the schedule of ``num_steps`` steps that start at ``first_step``, including their deferred updates."""
        # Omit reads at home, which move nothing. Keep writes: the prefetcher must not fetch a copy before a write.
        streamed = [access for access in self.accesses(homes) if homes[access.key] != access.tier or access.mode != "r"]
        period = len(self.ticks)
        deferred = [number for number, tick in enumerate(self.ticks) if self._is_deferred(tick)]
        start, end = first_step * period, (first_step + num_steps) * period
        return Schedule(streamed, period, end, start=start, deferred=deferred)


class WeightAccess(Protocol):
    """Interface through which the running model requests weights, in program order and on one thread."""

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Advance to the next tick: forward visits in order, then the head, then backward visits in reverse.

        The head is announced by its first visit. The model also announces visits that do not affect the loss, and takes
        their planned leases. The order of ticks and the traffic therefore depend only on the model, never on data.
        """

    def weights(self, unit: Unit, visit: int) -> AbstractContextManager[Mapping[str, Tensor | MatrixParts]]:
        """Lease a unit's weights in the compute dtype on the compute device, by full parameter name.

        For a cut weight, the value is a `MatrixParts`.
        """

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Skip a unit's weights. Called instead of ``weights`` if no token of the step is routed to the unit.

        Planned traffic is an upper bound, because it also counts skipped weights.
        """

    def announce_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Announce which visits, starting with the current visit, will skip their weights in forward and backward.

        Args:
            visits: Visits of all experts of one layer.
            idle: Visits that get no token.
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
        """Record that an activation and the (visit, index) in ``place`` are one tensor, which has one block."""

    def get_activation(self, visit: int, micro_batch: int, index: int) -> AbstractContextManager[Tensor]:
        """Lease an activation, bit-identical to the tensor that was put. Its own visit is the last to read it."""

    def results_block(self, visit: int, micro_batch: int) -> AbstractContextManager[Tensor]:
        """Lease the block of saved results, uint8 [N]. The forward writes the block, and the backward reads it once.

        Called only by visits that save results (``Recompute``), after the activations of the micro-batch.
        """


class MatrixParts(Protocol):
    """Matrix whose rows are stored in several blocks.

    Attributes:
        shape: [rows, columns] of the matrix.
        passes: Whether a tick leases the parts one at a time, each part once. If False, all parts are available.
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
        """Set the micro-batch, by its number in this process, to which the next gradients belong.

        Call this for the micro-batches in order. Each ``rows`` context starts again with the first micro-batch.
        """

    def rows_of_parts(self, name: str, /) -> Sequence[range]:
        """Return the row range of each part that must be filled within ``part``; empty if parts do not pass."""
        return ()

    def part(self, name: str, number: int, /) -> AbstractContextManager[None]:
        """Lease one part of a parameter's accumulator. Lease each part once. The head leases the parts in reverse."""
        raise AssertionError(f"{name} has no parts")

    def rows(self, name: str, start: int, stop: int, /) -> AbstractContextManager[None]:
        """Return a context in which all micro-batches add their products to these rows of the leased part."""
        raise AssertionError(f"{name} has no parts")

    def add(self, name: str, gradient: Tensor, /) -> None:
        """Add one micro-batch's gradient, in the compute dtype. A step's first gradient overwrites the accumulator."""

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0, /) -> None:
        """Add the product of two matrices to the rows of a gradient that start at ``first_row``.

        Together, the products of a pass must cover all rows of the gradient.
        """

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, ignored: int | None = None, /) -> None:
        """Add rows to the gradient's rows at ``indexes``, in order. Rows whose index is ``ignored`` are skipped."""


def activations_of(program: StepProgram) -> dict[int, set[str]]:
    """Return the keys of activation blocks, by visit, for all visits before the head."""
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
    """Return a copy of a visit's tick in which each micro-batch also leases its results block, after its inputs.

    Args:
        num_written: Number of inputs per micro-batch that the visit's forward writes. Earlier visits write the rest.
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
    """Return the program of one evaluation pass, which has only the ticks of the forward and reads only weights.

    If a weight has an encoding with other blocks, the pass reads those blocks. The pass leases each unit's weights once
    for all micro-batches. The program of an evaluation pass stays the same if it is passed in again.
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
    """Return a program whose passes read averages instead of weights, and round the averages to the compute dtype.

    Layouts without an average keep their weights. In other layouts, the block of the average replaces the block of the
    weight. If only the average is cut into parts, all its blocks replace the weight's single block.
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
    """Builder of a step's program, from a model's units and a trace of their visits.

    Args:
        order: ``layer`` runs all micro-batches of a layer before the next layer; ``micro_batch`` runs them one by one.
        optimizer: Optimizer that defines the kinds of state; None if no weights are updated.
        grad_dtype: Dtype of stored gradients.
        updates: Settings of updates. The builder fills in ``sent_elements``.
        sharding: This rank's share of the step. Several ranks require the order ``layer``.
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
            passing_parts: Whether to lease parts of gradients and cut weights one at a time where possible. Results
                are bit-identical either way, but the head then recomputes more logits.
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
            cuts=LayoutSplits(self._parts, self._cut_weights, self._passing),
            updates=self._updates,
            sharding=self._sharding,
            encodings=self._frozen.encodings,
        )

    def _with_traffic(
        self, updates: GroupUpdates, optimizer: Optimizer | None, is_elementwise: Callable[[UnitLayout], bool]
    ) -> GroupUpdates:
        """Return ``updates`` with the number of matrix elements that each update sends to the device."""
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
        """Return whether a layout is trainable and used by a visit. Only such layouts have gradients and state."""
        return layout.trainable and bool(self._uses[layout.name])

    def _slot_of(self, micro_batch: int) -> int:
        """Return which set of activation blocks a micro-batch uses; 0 if micro-batches run one at a time."""
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
        """Add gather and exchange ticks, which take over the held blocks of the given ticks.

        The given ticks keep their passing blocks: activations, and parts that they gather and exchange themselves.
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
        """Yield one group per accumulator. The first use site's groups include the other sites' accumulators to add."""
        others: dict[str, Group] = {}
        for name, uses in self._uses.items():
            keys = [self._part_keys(gradient_key(name, use), name) for use in range(len(uses))]
            others.update((own, tuple((key, "r") for key in rest)) for own, *rest in zip(*keys, strict=True))
        for key, mode in gradients:
            yield ((key, mode), *others.get(key, ()))

    def _with_updates(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Insert each update into the ticks of the last pass, after the tick that completes its gradient."""
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
        """Insert deferred updates into the ticks of the first pass, ``_lead`` ticks before a weight's first use."""
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
        """Return the keys of activations and added gradients, which are not needed after they are read."""
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
        """Return the accumulators that visits lease one part at a time, with other use sites' accumulators to add.

        The backward fills the first use site's accumulator last, and then adds all other sites' accumulators to it.
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
        """Return the activations that a visit writes or reads. Reused tensors are stored in blocks of earlier visits.

        The forward leases each activation separately. A recompute leases all activations of its micro-batch together.
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
        """Return the activations that earlier visits still need in their backward after this visit has read them."""
        places = self._trace.visits[visit].reused.values()
        return frozenset(activation_key(at, self._slot_of(m), index) for m in group for at, index in places)

    def _layouts_of(self, visit: int) -> tuple[str, ...]:
        return layouts_of_unit(self._graph, self._trace.visits[visit].unit)


def gathers_before(ticks: Sequence[Tick], weights: Sequence[Group], ahead: int) -> Iterator[list[Tick]]:
    """Yield a list of the gather ticks that run before each tick of a pass.

    Args:
        ticks: Forward, head and backward ticks in order.
        ahead: Number of additional ticks by which a weight is gathered early.
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
    """Return the group's blocks of one kind, ``weight`` or ``grad``."""
    return tuple((key, mode) for key, mode in group if kind_of_key(key) == kind)


def _is_added_to_held(group: Group) -> bool:
    """Return whether a group contains other use sites' gradients, which are added to a held gradient."""
    gradients = _blocks_of_kind("grad", group)
    return bool(gradients) and all(mode == "r" for _, mode in gradients)


def _model_phase(tick: Tick) -> ModelPhase:
    assert tick.phase in ("forward", "head", "backward"), tick
    return tick.phase


def layouts_of_unit(graph: ModelGraph, unit: int) -> tuple[str, ...]:
    """Return the names of the layouts that a unit uses, in order and without duplicates."""
    return tuple(dict.fromkeys(layout for _, _, layout in graph.units[unit].params))


def uses_of_layouts(graph: ModelGraph, trace: VisitTrace) -> dict[str, list[int]]:
    """Return the visits that use each layout, in forward order. These visits are the layout's use sites."""
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
        num_elements: Number of elements in the layout, or in this rank's shard of the layout.
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
    """Return the peak memory in bytes of decoded weights in one visit. The head counts as one visit."""

    def bytes_of_visit(visit: int, unit: int) -> int:
        return sum(program.decoded_bytes(visit, graph.layouts[name]) for name in layouts_of_unit(graph, unit))

    by_visit = [bytes_of_visit(number, visit.unit) for number, visit in enumerate(trace.visits)]
    head = sum(nbytes for nbytes, visit in zip(by_visit, trace.visits, strict=True) if visit.is_head)
    return max([head, *by_visit])


def weight_key(layout: str) -> str:
    return f"{layout}/weight"


def layout_of_key(key: str) -> str:
    """Return the layout to which a key belongs. The key must not contain a part number."""
    return key.rpartition("/")[0]


def state_key(layout: str, state: str) -> str:
    return f"{layout}/{state}"


def gradient_key(layout: str, use: int) -> str:
    return f"{layout}/grad.{use}"


def part_keys(key: str, num_parts: int) -> list[str]:
    """Return one key per part, or ``key`` itself if there is only one part."""
    return [key] if num_parts == 1 else [f"{key}.{part}" for part in range(num_parts)]


def stored_keys(key: str, stored: Container[str]) -> list[str]:
    """Return the stored keys of a block: ``key`` itself, or the keys of its parts in order, or no keys."""
    if key in stored:
        return [key]
    return list(takewhile(stored.__contains__, (f"{key}.{part}" for part in count())))


def stored_parts(key: str, stored: Mapping[str, BlockRecord]) -> list[tuple[range, str]]:
    """Return the stored blocks of a weight or a state, each with its range of elements."""
    found, start = [], 0
    for each in stored_keys(key, stored):
        stop = start + stored[each].shape[0]
        found.append((range(start, stop), each))
        start = stop
    return found


def kind_of_key(key: str) -> str:
    """Return the kind that a block's key names, for example ``weight``, ``low``, ``m`` or ``grad``."""
    return key.rpartition("/")[2].partition(".")[0]


def activation_key(visit: int, micro_batch: int, index: int) -> str:
    return f"activations/{visit}/{micro_batch}.{index}"


def results_key(visit: int, micro_batch: int) -> str:
    return f"activations/{visit}/{micro_batch}.results"


def cache_key(visit: int, micro_batch: int) -> str:
    return f"cache/{visit}/{micro_batch}"
