"""The program of one training step: its blocks, and its ticks in order, each with the blocks that it uses.

Every unit call of a forward is a *visit*. A step has one tick per visit forward, one for the head, one per visit
backward, and one per group of weights to update:

    update 0, forward 0, update 1, forward 1, ..., head, ..., backward 1, backward 0

Where several ranks train together, blocks are shards (`ranks/shards.py`), and ticks of a visit have others beside them:

    update 0, gather 0, forward 0, ..., gather 0, backward 0, exchange 0

A trace (`trace.py`) tells which units a model visits and what each visit saves for its backward; `ProgramBuilder` makes
the program of it. The planner counts bytes with the program and finds a home for every block; `tape.compile_step` turns
both into the leases of a step; the engine asks for them through `BlockAccess` while the model runs.
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
    """Bytes of one visit that are in no block, of one micro-batch, on the compute device.

    Attributes:
        held_nbytes: Live when the visit begins, without weights and gradient accumulators: hidden states, masks,
            tables.
        stays_nbytes: Of these, what is there until the backward: masks, tables, ids, and what autograd saves of the
            model's own code between visits. In layer order every micro-batch holds this, and the rest twice: its own
            and the next visit's.
        forward_nbytes: Peak on top of that while the unit runs (and the model's own code up to the next visit).
        backward_nbytes: Peak of recompute and backward on top of what is held, gradients of the parameters included.
        graph_nbytes: Size of the forward's graph if it is kept for the backward: all that autograd saves, the inputs,
            and weights cast to other dtypes; not the weights themselves, nor what visits share.
    """

    held_nbytes: int
    stays_nbytes: int
    forward_nbytes: int
    backward_nbytes: int
    graph_nbytes: int


@dataclass(frozen=True, slots=True)
class TracedVisit:
    """One unit call of a forward.

    Attributes:
        is_head: Whether it runs in the head phase, piece by piece.
        has_backward: Whether the backward recomputes the unit. False where nothing trained comes before its output, and
            where the loss does not depend on it: the visit is announced then, but no weights are leased.
        saved: `(shape, dtype)` of every activation that is offloaded until the backward.
        reused: (visit, index) of the activation of an earlier visit, by index of one that is the same tensor: there is
            one block for both.
        chance_of_no_token: That a token goes to none of a mixture's experts here, if it goes to any as likely.
        backward: Work of recompute and backward, as they are run. Both are none for visits of the head.
        by_part: Owner's names of the parameters of which the visit can take one part after the other, of the weight and
            of its gradient.
        attention: Results of its attention kernels that may be saved for the recompute.
        results: Those of attention, and of its products that are needed.
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
    def is_run_again(self) -> bool:
        """Whether its backward runs it a second time, unless its graph is kept."""
        return self.has_backward and not self.is_head

    @property
    def recompute(self) -> Work:
        """Work of the second run, which is in that of the backward; none where there is none."""
        return self.forward - self.unneeded.work if self.is_run_again else NO_WORK


@dataclass(frozen=True, slots=True)
class VisitTrace:
    """The visits of one forward in order, the head's last.

    Attributes:
        head_nbytes: Peak of the head phase of one micro-batch on top of what is held: one piece of logits with its
            gradients, and the gradient of the trunk's output.
        head_rows: Rows of logits at a time; 0 if the head is not chunked.
        head_columns: Words of the vocabulary at a time; 0: all.
        head_part_nbytes: Size of the graph of a part's logits, if it is kept for the second pass. Of one part it is in
            ``head_nbytes``.
        guesses: Values that the trace made up, where and why, a sentence each: counts are estimates then.
        uncounted: Operators without a FLOP formula, and why; byte counts do not depend on it.
        head: Work of the head phase, forward and backward, with a label for every token, each logit computed once.
        logits_flops: Floating-point operations of the logits; the second pass computes those again that were not
            kept.
        dense_masks: What takes masks of [S, S]: memory is quadratic in the length of rows then.
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
        """Whether byte counts are exact: no value was made up."""
        return not self.guesses


#: The phases that the running model announces; the others stand between these.
ModelPhase = Literal["forward", "head", "backward"]
Phase = Literal["forward", "head", "backward", "update", "gather", "exchange"]
Kind = Literal["weights", "optimizer", "gradients", "activations"]

#: (tick, key) of a use -> tick of the block's next use, until which the copy stays pinned. A tick that is not later is
#: one of the next step.
Stays = Mapping[tuple[int, str], int]

#: (key, mode) of blocks that are leased together.
Group = tuple[tuple[str, Mode], ...]

_DECODED_ALIGNMENT_BYTES = 64

#: Kinds of blocks whose contents outlive a step: a checkpoint holds these.
DURABLE_KINDS: tuple[Kind, ...] = ("weights", "optimizer")

#: Order in which kinds are shown, and preferred for the faster tier where they save equally many bytes.
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A block of the run: a flat tensor of ``num_elements`` of ``dtype``.

    Attributes:
        part_of: key that all parts together would have; empty: it is no part.
        in_folder: it is never written, and the model's folder has its contents: no checkpoint needs to hold it.
        in_place: and it can be read from there each time that it is used: its home may be the folder.
        num_packed: The elements that a block of packed bytes is decoded to; 0: the block has no packed bytes.
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
        """The key that all parts together have."""
        return self.part_of or self.key

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def num_numbers(self) -> int:
        """The elements that it holds, or stands for."""
        return self.num_packed or self.num_elements

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint holds it."""
        return self.kind in DURABLE_KINDS and not self.in_folder


@dataclass(frozen=True, slots=True)
class Tick:
    """One position in a step, with the blocks that it uses.

    Attributes:
        phase: all use the compute tier but update, which uses the one that ``StepProgram.tier_of`` names.
        visit: index of the layout for ``update``; ordinal of the unit call for the others.
        held: (key, mode) of blocks leased together for the whole tick.
        passing: groups of (key, mode) leased one after the other within it, the blocks of a group together: an
            activation of a micro-batch, or one part of a layout's state and gradient.
        spent: keys whose contents are dead after the tick: discarded, never written back.
        serves: For ``gather`` and ``exchange``: the phase of the visit's tick that it brings weights to, or takes
            gradients from. With several ranks, parts that pass are gathered and exchanged within the visit's own tick.
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
        parts: Layout -> the ranges of elements that its state and gradients are blocks of, if there are several.
        weights: Layouts whose weight is a block for each part, too: all visits that use it can take it so.
        passing: (visit, layout) of the gradients, and of such weights, whose parts are leased one after the other.
    """

    parts: Mapping[str, Sequence[range]] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    passing: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a step keeps of its forward, so that the backward need not compute it again. It changes no bits.

    A visit is in one of the first three sets, or in none.

    Attributes:
        kept_graphs: Visits whose graphs are kept for the backward; their inputs are no blocks.
        saved_attention: Visits whose attention results are blocks, for their recompute.
        saved_results: Visits of which those of products are as well.
        kept_parts: Parts of the vocabulary whose logits the head keeps for its second pass.
    """

    kept_graphs: frozenset[int] = frozenset()
    saved_attention: frozenset[int] = frozenset()
    saved_results: frozenset[int] = frozenset()
    kept_parts: int = 1

    def savable(self, number: int, visit: TracedVisit) -> Savable:
        """Return the results that a visit, by its number, saves."""
        if number in self.saved_results:
            return visit.results
        return visit.attention if number in self.saved_attention else NOT_SAVABLE

    @property
    def saving(self) -> frozenset[int]:
        """Visits that have a block of results."""
        return self.saved_attention | self.saved_results


#: The backward computes everything again.
KEEP_NOTHING = Recompute()


@dataclass(frozen=True, slots=True)
class GroupUpdates:
    """When and where weights are updated, and what that moves beside their blocks. Layouts are named by their index.

    Attributes:
        are_deferred: Whether the norm of the whole step decides about its updates: the next step makes them.
        in_compute_tier: Whether the optimizer can update blocks there.
        beside_device: Where a device computes, the host updates a layer while the next one is computed. Takes one more
            layer's gradients where updates are not deferred.
        streamed: Layouts that are updated in the compute tier wherever their blocks live: these are fetched for it,
            part by part, and written back.
        sent_elements: Layout -> elements of its matrices, which an update in RAM sends to the compute device
            and back, in bf16.
    """

    are_deferred: bool = True
    in_compute_tier: bool = False
    beside_device: bool = True
    streamed: frozenset[int] = frozenset()
    sent_elements: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Where weights come from that are not trained.

    Attributes:
        in_folder: Whether the model's folder has them: no checkpoint needs to hold them.
        in_place: Names of layouts that may stay there: each use reads them.
        encodings: Layout -> how blocks hold its weight where they do not hold what layers compute with.
    """

    in_folder: bool = False
    in_place: Collection[str] = ()
    encodings: Mapping[str, Encoding] = field(default_factory=dict)


@dataclass(frozen=True)
class StepProgram:
    """All blocks and ticks of a step. Ticks are numbered by their position.

    Deferred ``update`` ticks finish the step before: clipping needs the global norm, which is known only after the
    whole backward, so each group is updated in the next step, just before the forward that first reads its weights.
    The first step lacks these ticks; after the last one only they are left. Updates that are not deferred follow the
    backward that completes their gradient.

    Attributes:
        cuts: Which layouts are blocks of parts, and which parts pass one by one.
        encodings: Layout -> how blocks hold its weight where they do not hold what layers compute with: it is decoded
            in the compute tier for each visit.
        occupants: (tick, key) -> the gradient that a shared block holds in that tick (``sharing.py``).
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
        """Return the ranges of elements that a layout's state and gradients are blocks of, or shards of them."""
        return self.cuts.parts.get(layout.name) or (range(layout.num_elements),)

    def owned_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the elements that each block of a layout's state, and of its gradients, holds."""
        return [self.sharding.shards.owned(part) for part in self.parts_of(layout)]

    def weight_keys(self, layout: UnitLayout) -> list[str]:
        """Return the keys of a weight, of its parts if it is cut; or of what is read in its place."""
        encoding = self.encodings.get(layout.name)
        if encoding is not None and encoding.keys:
            return list(encoding.keys)
        return part_keys(weight_key(layout.name), len(self.weight_parts_of(layout)))

    def weight_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the ranges of elements that a layout's weight is blocks of, or shards of them."""
        encoding = self.encodings.get(layout.name)
        is_cut = layout.name in self.cuts.weights or (encoding is not None and bool(encoding.keys))
        return self.parts_of(layout) if is_cut else (range(layout.num_elements),)

    def decoded_bytes(self, visit: int, layout: UnitLayout) -> int:
        """Return the room that a visit decodes a weight into; 0: its blocks hold the weight itself."""
        encoding = self.encodings.get(layout.name)
        if encoding is None or not self.sharding.shards.are_whole:  # shards are decoded on the way into full copies
            return 0
        keys, is_cut = self.weight_keys(layout), layout.name in self.cuts.weights
        if encoding.dtype == self.blocks[keys[0]].dtype and (len(keys) == 1 or is_cut):
            return 0
        sizes = [len(part) * encoding.dtype.itemsize for part in self.weight_parts_of(layout)]
        nbytes = max(sizes) if self.passes_weight(visit, layout.name) else sum(sizes)
        return round_up(nbytes, _DECODED_ALIGNMENT_BYTES)  # weights lie one beside the other

    def gathered_dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a block is gathered: averages are rounded before."""
        block = self.blocks[key]
        return block.dtype if block.kind == "weights" else self.encodings[layout_of_key(block.whole)].dtype

    def gathered_bytes(self, key: str) -> int:
        """Return what a rank sends of a block to each of the others."""
        return self.blocks[key].num_elements * self.gathered_dtype(key).itemsize

    def owned_weight_parts_of(self, layout: UnitLayout) -> Sequence[range]:
        """Return the elements that each block of a layout's weight holds."""
        return [self.sharding.shards.owned(part) for part in self.weight_parts_of(layout)]

    def full_elements(self, layout: UnitLayout) -> int:
        """Return the length of a full copy of a layout's weight, or gradient: what its last shards add included."""
        return max(self.sharding.shards.gathered(part).stop for part in self.parts_of(layout))

    def links_between_ranks(self) -> list[str]:
        """Return the links that bytes move on to other ranks, and from them."""
        lanes = self.sharding.lanes
        return peer_links(self.compute_tier, lanes.size, lanes.num_hosts)

    def bytes_beside_blocks(self, number: int) -> dict[str, int]:
        """Return what a tick, by position, moves beside blocks: link -> bytes.

        An update sends directions of matrices to the compute device and back; other ticks gather and exchange.
        """
        tick, moved = self.ticks[number], dict[str, int]()
        if tick.phase == "update" and (sent := self.updates.sent_elements.get(tick.visit)):
            moved = dict.fromkeys((f"ram->{self.compute_tier}", f"{self.compute_tier}->ram"), DIRECTION_BYTES * sent)
        return moved if self.sharding.shards.are_whole else moved | self._collective_bytes(number)

    def _collective_bytes(self, number: int) -> dict[str, int]:
        """Return what a tick, by position, sends to other ranks and receives from them: link -> bytes."""
        tick = self.ticks[number]
        moved = dict.fromkeys(self.links_between_ranks(), 0)
        if tick.phase == "update":
            return moved
        gathered = [key for key, _ in tick.uses if self.is_gathered(key)]
        self._count_collectives(moved, sum(map(self.gathered_bytes, gathered)), is_gather=True)
        # Sums are in fp32, whatever dtype gradients rest in.
        exchanged = [self.contents(number, key) for key, mode in tick.uses if mode != "r"]
        elements = sum(block.num_elements for block in exchanged if block.kind == "gradients")
        self._count_collectives(moved, 4 * elements, is_gather=False)
        return moved

    def is_gathered(self, key: str) -> bool:
        """Return whether ticks other than updates read a block as a weight: ranks gather it."""
        return self.blocks[key].kind in DURABLE_KINDS

    def _count_collectives(self, moved: dict[str, int], shard: int, *, is_gather: bool) -> None:
        """Add what gathers, or exchanges, of shards of so many bytes send and receive."""
        lanes, rank = self.sharding.lanes, self.sharding.shards.rank
        own = 1 if is_gather else len(lanes.sums_of_rank(rank))
        received = lanes.size - 1 if is_gather else lanes.num_sums - own
        place = PEER if lanes.num_hosts == 1 else NETWORK
        moved[f"{self.compute_tier}->{place}"] += (lanes.size - 1) * own * shard
        moved[f"{place}->{self.compute_tier}"] += received * shard

    def passes_weight(self, visit: int, layout: str) -> bool:
        """Return whether the parts of a weight are leased one after the other in a visit."""
        return layout in self.cuts.weights and (visit, layout) in self.cuts.passing

    def state_keys(self, layout: UnitLayout, state: str) -> list[str]:
        """Return the keys of a kind of state, one for each part."""
        return part_keys(state_key(layout.name, state), len(self.parts_of(layout)))

    def gradient_keys(self, layout: UnitLayout, use: int) -> list[str]:
        """Return the keys of a use site's accumulators, one for each part."""
        return part_keys(gradient_key(layout.name, use), len(self.parts_of(layout)))

    def contents(self, tick: int, key: str) -> BlockPlan:
        """Return what a block holds in a tick: itself, or the gradient whose turn it is.

        Args:
            tick: that uses the block, by position.
        """
        return self.occupants.get((tick, key)) or self.blocks[key]

    def chosen_ticks(self, *, updates: bool = True, passes: bool = True) -> dict[int, Tick]:
        """Return the ticks of a step in order, by position.

        Args:
            updates: include the deferred updates, which finish the step before.
            passes: include its own ticks: forward, head, backward.
        """
        return {n: tick for n, tick in enumerate(self.ticks) if (updates if self._is_deferred(tick) else passes)}

    def _is_deferred(self, tick: Tick) -> bool:
        return self.updates.are_deferred and tick.phase == "update"

    def tier_of(self, tick: Tick, homes: Mapping[str, str]) -> str:
        """Return the tier of a tick's leases.

        An update runs in the compute tier if weights and state are at home there, or if the plan streams it; else in
        RAM.
        """
        if tick.phase != "update":
            return self.compute_tier
        if not self.updates.in_compute_tier:
            return "ram"
        if tick.visit in self.updates.streamed:
            return self.compute_tier
        # The weight first: plans ask this often, and of a layer of many parts it mostly settles it.
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
        """Return the schedule of ``num_steps`` steps from ``first_step`` on, and of the updates that end them."""
        # Reads at home move nothing. Writes at home count: the prefetcher must not fetch a copy elsewhere before them.
        streamed = [access for access in self.accesses(homes) if homes[access.key] != access.tier or access.mode != "r"]
        period = len(self.ticks)
        deferred = [number for number, tick in enumerate(self.ticks) if self._is_deferred(tick)]
        start, end = first_step * period, (first_step + num_steps) * period
        return Schedule(streamed, period, end, start=start, deferred=deferred)


class WeightAccess(Protocol):
    """Weights of a pass, as the running model asks for them: in the order of the program. Used by one thread."""

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Go to the next tick: forward visits 0.., the head (by its first visit), backward visits ..0.

        A visit that the loss does not depend on is announced too, and what was planned for its backward is leased
        unused, so that the order of ticks, and what moves, depends on the model alone, never on data.
        """

    def weights(self, unit: Unit, visit: int) -> AbstractContextManager[Mapping[str, Tensor | MatrixParts]]:
        """Lease a unit's weights: owner's full parameter name -> tensor in the compute dtype on the compute device.

        A weight that is cut comes as its parts.
        """

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Leave a unit's weights where they are, in place of ``weights``: no token of the step goes to it.

        What was planned to move is the most that may move then.
        """

    def note_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Note of visits, the present one and later, which will leave their weights where they are; and backward.

        Args:
            visits: Those of all experts of a layer.
            idle: those to which no token goes.
        """


class BlockAccess(WeightAccess, Protocol):
    """Blocks of one step, as the running model asks for them.

    A unit that is called twice in a forward has two visits, and each visit is a use site with its own accumulators.
    """

    def gradients(self, unit: Unit, visit: int) -> AbstractContextManager[GradientSink]:
        """Lease the accumulators of a unit's trainable parameters, if it has any, at this use site."""

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        """Copy an activation into its block; the caller's tensor is not referenced afterwards."""

    def reuse_activation(self, visit: int, micro_batch: int, index: int, place: tuple[int, int]) -> None:
        """Note that an activation is one of an earlier visit, (visit, index), whose block is leased in its place."""

    def get_activation(self, visit: int, micro_batch: int, index: int) -> AbstractContextManager[Tensor]:
        """Lease an activation: the same shape, dtype and bits. Its contents are dead once its own visit had it."""

    def results_room(self, visit: int, micro_batch: int) -> AbstractContextManager[Tensor]:
        """Lease the bytes of saved results, uint8 [N]: in the forward to write, in the backward to read once.

        For visits that save results only (``Recompute``). Comes after the activations of the micro-batch.
        """


class MatrixParts(Protocol):
    """A matrix whose rows are in several blocks.

    Attributes:
        shape: [rows, columns] of the matrix.
        passes: whether one part is leased at a time, each once in a tick; else all are there.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> Sequence[range]: ...

    @property
    def passes(self) -> bool: ...

    def part(self, number: int, /) -> AbstractContextManager[Tensor]:
        """Lease the rows of a part."""


class GradientSink(Protocol):
    """fp32 gradient accumulators of one use site."""

    def at(self, micro_batch: int, /) -> None:
        """Go on to a micro-batch, by its number in this process: what is accumulated next is its gradient.

        Micro-batches come in order; inside of ``rows`` from the first one on, once more.
        """

    def rows_of_parts(self, name: str, /) -> Sequence[range]:
        """Return the rows of the parts that are to be filled one after the other, inside of ``part``; else nothing."""
        return ()

    def part(self, name: str, number: int, /) -> AbstractContextManager[None]:
        """Lease a part of a parameter's accumulator. Each is leased once, the head's in reverse."""
        raise AssertionError(f"{name} is there, whole")

    def rows(self, name: str, start: int, stop: int, /) -> AbstractContextManager[None]:
        """Accumulate products in these rows of the part that is leased, for all micro-batches."""
        raise AssertionError(f"{name} is there, whole")

    def add(self, name: str, gradient: Tensor, /) -> None:
        """Accumulate one micro-batch's gradient (compute dtype, the parameter's shape); a step's first is copied."""

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0, /) -> None:
        """Accumulate the product of two matrices, in rows of a matrix from ``first_row`` on.

        Where these are not all of its rows, the products of a pass cover them all.
        """

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, ignored: int | None = None, /) -> None:
        """Accumulate rows of a matrix, one after the other; not those whose index is ``ignored``."""


def activations_of(program: StepProgram) -> dict[int, set[str]]:
    """Return the activation blocks of every visit before the head."""
    keys: dict[int, set[str]] = {}
    for tick in program.ticks:
        if tick.phase == "forward":
            of_tick = {key for group in tick.passing for key, _ in group if program.blocks[key].kind == "activations"}
            keys.setdefault(tick.visit, set()).update(of_tick)
    return keys


def keeping_graphs(program: StepProgram, visits: frozenset[int]) -> StepProgram:
    """Return the program in which these visits keep their graphs: no activations are written or read for them."""
    dropped = {key for visit, keys in activations_of(program).items() if visit in visits for key in keys}

    def is_input(group: Group) -> bool:  # its own, or one of an earlier visit
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
    assert all(key in blocks for tick in ticks for key, _ in tick.uses), "a later visit runs again with such an input"
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
    """Return the program in which these visits save results: one block of bytes for each micro-batch.

    Args:
        visits: that have such results, save none, and whose graphs are not kept.
        with_products: Results of products as well as attention's.
    """
    blocks, ticks = dict(program.blocks), list(program.ticks)
    for number, tick in enumerate(ticks):
        if tick.phase in ("forward", "backward") and tick.visit in visits:
            traced = trace.visits[tick.visit]
            ticks[number] = _saving_results(tick, program, len(traced.saved) - len(traced.reused))
            nbytes = (traced.results if with_products else traced.attention).nbytes
            # In the order of the tick: the order of blocks decides ties between homes.
            for key in [key for key in dict(ticks[number].uses) if key not in blocks]:
                blocks[key] = BlockPlan(key, "activations", nbytes, torch.uint8)
    before = program.recompute
    if with_products:
        recompute = replace(before, saved_results=before.saved_results | visits)
    else:
        recompute = replace(before, saved_attention=before.saved_attention | visits)
    return replace(program, blocks=blocks, ticks=tuple(ticks), recompute=recompute)


def _saving_results(tick: Tick, program: StepProgram, num_written: int) -> Tick:
    """Return the tick of a visit with the blocks of results behind each micro-batch's inputs.

    Args:
        num_written: inputs of a micro-batch that the forward keeps here, and not with an earlier visit.
    """
    groups: list[Group] = []
    num_groups = num_written if tick.phase == "forward" else 1
    slots = [slot for slot in range(len(tick.passing)) if activation_key(tick.visit, slot, 0) in program.blocks]
    for slot in slots:
        inputs = tick.passing[slot * num_groups : (slot + 1) * num_groups]
        key = results_key(tick.visit, slot)
        if tick.phase == "forward":
            groups += [*inputs, ((key, "w"),)]
        else:  # inputs and results are there together while the unit runs again
            groups.append((*(use for group in inputs for use in group), (key, "r")))
    others = tick.passing[len(slots) * num_groups :]
    spent = {results_key(tick.visit, slot) for slot in slots} if tick.phase == "backward" else set()
    return replace(tick, passing=(*groups, *others), spent=tick.spent | spent)


def evaluation_program(program: StepProgram) -> StepProgram:
    """Return the program of one evaluation pass: forward and head of a step, with the weights as its only blocks.

    Or with what is read in their place: of a program of such passes it is the same.

    Each unit's weights are leased once, for all micro-batches of the pass.
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
    """Return the program of passes that read averages where a layout has some, each rounded when it is there.

    A block of an average takes the place of one of the weight; of a weight that is not cut, as its state is, all do.
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
    """Builds the program of a step from a model's units and the trace of their visits.

    Args:
        trace: Visits of one forward, with what each saves for its backward.
        order: ``layer`` (all micro-batches of a layer before the next layer) or ``micro_batch``.
        optimizer: Updates the weights: kinds of state are its own. None: nothing is trained, or updated.
        grad_dtype: Precision of gradients at rest.
        updates: When and where groups are updated; what that moves beside blocks is found here.
        frozen: Where weights come from that are not trained.
        sharding: What this rank has of the step; several ranks need the order ``layer``.
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
        assert order == "layer" or own_lanes.num_lanes == 1, "a lane's sum is open for one visit"
        self._graph, self._trace = graph, trace
        self._num_micro_batches, self._order = num_micro_batches, order
        self._compute_tier, self._grad_dtype = compute_tier, grad_dtype
        state_kinds = () if optimizer is None else optimizer.state_kinds(graph.dtype.itemsize == 2)
        self._state_kinds = [kind for kind in state_kinds if kind.name != "weight"]
        self._uses = uses_of_layouts(graph, trace)

        # Whoever needs a whole parameter at once has whole blocks.
        def is_elementwise(layout: UnitLayout) -> bool:
            return all(kind.is_like_weight(layout) for kind in state_kinds)

        self._parts = {
            layout.name: layout.parts
            for layout in graph.layouts.values()
            if is_elementwise(layout) and len(layout.parts) > 1 and self._is_trained(layout)
        }
        self._updates = self._with_moves(updates or GroupUpdates(), optimizer, is_elementwise)
        # A shard of each part: then a rank's blocks of weight, state and gradient have the same elements.
        self._cut_weights = frozenset(
            name
            for name in self._parts
            if not self._shards.are_whole or all(self._takes_parts(visit, name) for visit in self._uses[name])
        )
        # Where a device computes meanwhile, the host updates beside it: the weights of the next forward, or, during
        # the backward, those of the visit before the one that the device is at.
        self._lead = int(compute_tier != "ram" and self._updates.beside_device)
        self._passing: frozenset[tuple[int, str]] = frozenset()

    def build(self, *, passing_parts: bool = False) -> StepProgram:
        """Return the program.

        Args:
            passing_parts: Lease the parts of a gradient, and of a weight that is cut, one after the other where that is
                possible. It changes no bits; the head makes more logits a second time.
        """
        self._passing = frozenset(
            (visit, layout)
            for layout in (self._parts if passing_parts else ())
            for visit in self._uses[layout]
            if self._takes_parts(visit, layout)
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

    def _with_moves(
        self, updates: GroupUpdates, optimizer: Optimizer | None, is_elementwise: Callable[[UnitLayout], bool]
    ) -> GroupUpdates:
        """Return the updates with what those of matrices move beside their blocks."""
        trained = {
            index: layout for index, layout in enumerate(self._graph.layouts.values()) if self._is_trained(layout)
        }
        assert self._shards.are_whole or all(map(is_elementwise, trained.values())), "shards are not enough"
        if not isinstance(optimizer, MatrixOptimizer) or self._compute_tier == "ram":
            return updates
        # Matrices go to the compute device and come back in an update.
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
        """Return whether a layout has gradients and state: it is not frozen, and the model calls its module."""
        return layout.trainable and bool(self._uses[layout.name])

    def _slot_of(self, micro_batch: int) -> int:
        """Return the number of a micro-batch's activation blocks: one set for all where they run one at a time."""
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
        """Yield ticks that hold nothing, after those that gather weights, before those that exchange gradients.

        What passes in a tick still does: activations, and parts, which are gathered and exchanged within it.
        """
        weights = [_of_kind("weight", tick.held) for tick in ticks]
        for gathers, tick in zip(gathers_before(ticks, weights, self._sharding.gathers_ahead), ticks, strict=True):
            yield from gathers
            passing = tuple(group for group in tick.passing if not _is_added_to_held(group))
            yield replace(tick, held=(), passing=passing, spent=self._spent(passing) & tick.spent)
            if gradients := _of_kind("grad", tick.held):
                summed = tuple(self._exchanged(gradients))
                yield Tick("exchange", tick.visit, (), summed, self._spent(summed), _model_phase(tick))

    def _exchanged(self, gradients: Group) -> Iterator[Group]:
        """Yield each accumulator of a use site; the first site's with those of others, which are added to it."""
        others: dict[str, Group] = {}
        for name, uses in self._uses.items():
            keys = [self._part_keys(gradient_key(name, use), name) for use in range(len(uses))]
            others.update((own, tuple((key, "r") for key in rest)) for own, *rest in zip(*keys, strict=True))
        for key, mode in gradients:
            yield ((key, mode), *others.get(key, ()))

    def _with_updates(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Yield the ticks of the last pass, and the updates after those that complete their gradients."""
        waiting: deque[list[Tick]] = deque([] for _ in range(self._lead))
        for tick in ticks:
            yield tick
            filled = {key for key, mode in tick.uses if mode != "r"}
            # A shared layout has several use sites; backward reaches the first one last and sums the others there.
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
        """Yield the ticks of the first pass, each after the updates of the weights that it, or the next, uses first."""
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
            if weights:  # a part comes twice: for the loss, and for the gradients
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
        """Return what is dead once it has been read: activations, and gradients that were added to others."""
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
        """Return the parts of weights that a visit takes one after the other."""
        names = [name for name in self._layouts_of(visit) if self._passes_weight(visit, name)]
        return tuple(((key, "r"),) for name in names for key in self._weight_keys(name))

    def _passes_weight(self, visit: int, layout: str) -> bool:
        return layout in self._cut_weights and self._is_by_part(visit, layout)

    def _weight_keys(self, layout: str) -> list[str]:
        key = weight_key(layout)
        return self._part_keys(key, layout) if layout in self._cut_weights else [key]

    def _gradients(self, visit: int, *, is_first: bool) -> Group:
        """Return the accumulators that a visit holds."""
        return tuple(
            (key, "w" if is_first else "rw")
            for name in self._trained_layouts_of(visit)
            if not self._is_by_part(visit, name)
            for key in self._part_keys(gradient_key(name, self._uses[name].index(visit)), name)
        )

    def _passing_gradients(self, visits: Sequence[int], *, is_first: bool, is_last: bool) -> tuple[Group, ...]:
        """Return the accumulators that pass, part by part: those that are added to others, and the visits' own.

        The first use site, which backward fills last, takes those of all others.
        """
        groups: list[Group] = []
        for visit in visits:
            for name in self._trained_layouts_of(visit):
                uses = self._uses[name]
                others = range(1, len(uses)) if is_last and uses[0] == visit else ()
                of_parts = zip(*(self._part_keys(gradient_key(name, use), name) for use in others), strict=True)
                summed: list[Group] = [tuple((key, "r") for key in keys) for keys in of_parts]
                if self._is_by_part(visit, name):
                    own = self._part_keys(gradient_key(name, uses.index(visit)), name)
                    summed = [
                        ((key, "w" if is_first else "rw"), *group)
                        for key, group in zip(own, summed or [()] * len(own), strict=True)
                    ]
                    if self._trace.visits[visit].is_head:  # its second pass goes back
                        summed.reverse()
                groups += summed
        return tuple(groups)

    def _is_by_part(self, visit: int, layout: str) -> bool:
        """Return whether the parts of a layout pass in a visit."""
        return (visit, layout) in self._passing

    def _takes_parts(self, visit: int, layout: str) -> bool:
        if layout not in self._parts or not self._graph.layouts[layout].first_rows:
            return False
        return self._graph.layouts[layout].entries[0].name in self._trace.visits[visit].by_part

    def _trained_layouts_of(self, visit: int) -> list[str]:
        return [name for name in self._layouts_of(visit) if self._graph.layouts[name].trainable]

    def _activations(self, visit: int, group: Sequence[int], mode: Mode) -> tuple[Group, ...]:
        """Return the activations that a visit writes, or reads: among these are others' that are the same tensors.

        Each is written as it is computed; what a micro-batch reads is there together while the unit runs again.
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
        """Return the activations that a visit reads and that others, earlier in the forward, will need as well."""
        places = self._trace.visits[visit].reused.values()
        return frozenset(activation_key(at, self._slot_of(m), index) for m in group for at, index in places)

    def _layouts_of(self, visit: int) -> tuple[str, ...]:
        return layouts_of_unit(self._graph, self._trace.visits[visit].unit)


def gathers_before(ticks: Sequence[Tick], weights: Sequence[Group], ahead: int) -> Iterator[list[Tick]]:
    """Yield for each tick of a pass the ticks that come before it and gather weights.

    Args:
        ticks: Forward, head and backward of the running model, in order.
        ahead: how many ticks before it is needed a weight is gathered.
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


def _of_kind(kind: str, group: Group) -> Group:
    """Return the blocks of a group that are of a kind: ``weight`` or ``grad``."""
    return tuple((key, mode) for key, mode in group if kind_of_key(key) == kind)


def _is_added_to_held(group: Group) -> bool:
    """Return whether a group is of other use sites' gradients alone, which are added to one that a tick holds."""
    gradients = _of_kind("grad", group)
    return bool(gradients) and all(mode == "r" for _, mode in gradients)


def _model_phase(tick: Tick) -> ModelPhase:
    assert tick.phase in ("forward", "head", "backward"), tick
    return tick.phase


def layouts_of_unit(graph: ModelGraph, unit: int) -> tuple[str, ...]:
    """Return the names of the layouts whose parameters a unit uses, in order, without repeats."""
    return tuple(dict.fromkeys(layout for _, _, layout in graph.units[unit].params))


def uses_of_layouts(graph: ModelGraph, trace: VisitTrace) -> dict[str, list[int]]:
    """Return for every layout the visits that use it, in forward order: its use sites."""
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
    """Return the block of a layout's weights where it is one.

    Args:
        num_elements: How many of them the block holds: all, or a rank's shard.
        encoding: How the block holds the weights; None: as they are.
        in_place: it can be read from the folder, if it is there.
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
    """Return what the weights take, at most, that one visit decodes; the head's visits are one."""

    def of_visit(visit: int, unit: int) -> int:
        return sum(program.decoded_bytes(visit, graph.layouts[name]) for name in layouts_of_unit(graph, unit))

    by_visit = [of_visit(number, visit.unit) for number, visit in enumerate(trace.visits)]
    head = sum(nbytes for nbytes, visit in zip(by_visit, trace.visits, strict=True) if visit.is_head)
    return max([head, *by_visit])


def weight_key(layout: str) -> str:
    return f"{layout}/weight"


def layout_of_key(key: str) -> str:
    """Return the layout of a block of its weight, state or gradients, given the key of all parts together."""
    return key.rpartition("/")[0]


def state_key(layout: str, state: str) -> str:
    return f"{layout}/{state}"


def gradient_key(layout: str, use: int) -> str:
    return f"{layout}/grad.{use}"


def part_keys(key: str, num_parts: int) -> list[str]:
    """Return the keys of the parts of what has ``key`` as a whole: the key itself, if it is not cut."""
    return [key] if num_parts == 1 else [f"{key}.{part}" for part in range(num_parts)]


def stored_keys(key: str, stored: Container[str]) -> list[str]:
    """Return the keys of ``key``'s parts among stored blocks, in order; none where there is no such block."""
    if key in stored:
        return [key]
    return list(takewhile(stored.__contains__, (f"{key}.{part}" for part in count())))


def kind_of_key(key: str) -> str:
    """Return what a block is, without its part: ``weight``, ``low``, ``m``, ``grad`` ..."""
    return key.rpartition("/")[2].partition(".")[0]


def activation_key(visit: int, micro_batch: int, index: int) -> str:
    return f"activations/{visit}/{micro_batch}.{index}"


def results_key(visit: int, micro_batch: int) -> str:
    return f"activations/{visit}/{micro_batch}.results"


def cache_key(visit: int, micro_batch: int) -> str:
    return f"cache/{visit}/{micro_batch}"
