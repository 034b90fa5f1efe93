"""A step of which every rank owns a share of each block, and computes some of the micro-batches.

`RankedAccess` stands where `StoreAccess` stands for a run of one process. The weights that the running model gets are
full copies, gathered from the shares of all ranks; its gradients are summed in memory of their own, which an exchange
cuts into shares and adds up in the order of lanes (`ranks/lanes.py`). Leases, updates and traffic of shares are those
of any run. Copies and sums are no blocks: they are workspace, and `workspace.collective_transients` plans it.

All collectives are issued by ticks of the program, never by what the model asks for: that depends on the data. Parts
of the vocabulary that pass one by one are gathered, and their gradients exchanged, within the tick that they pass in:
each has its turn there, and what the model does not ask for has its turn all the same (`RankedAccess._come_to`).

Where the program gathers ahead (`Sharding.gathers_ahead`), collectives go on beside the layers. On a GPU they are
queued on a stream of their own, and the streams wait for each other on the device: the host waits for none of them. The
window of copies and sums is exact there, as no memory is freed before both streams are done with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.base.layout import views
from megatrain.engine.access import (
    LeasedParts,
    PartwiseAccumulator,
    PassingGradient,
    StoreAccess,
    zero_gaps,
)
from megatrain.engine.host_io import sent_to_host
from megatrain.engine.program import layouts_of_unit
from megatrain.engine.weight_gradients import GradientAccumulator, LaneAccumulator
from megatrain.optim.base import MatrixOptimizer
from megatrain.optim.clip import add_in_order, partial_squares, sum_gradients
from megatrain.ranks.lanes import total
from megatrain.ranks.shares import SHARE_BLOCK_ELEMENTS

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.engine.access import CountedTotal
    from megatrain.engine.program import GradientSink, MatrixParts, ModelPhase, Phase, StepProgram
    from megatrain.engine.tape import Op
    from megatrain.models.graph import Unit
    from megatrain.ranks.collectives import Collectives
    from megatrain.ranks.dealing import DealtLayout
    from megatrain.ranks.lanes import Subtree

__all__ = ["RankedAccess", "describe_collectives"]


@dataclass(slots=True)
class _FullCopies:
    """Full copies of the weights of one tick.

    Attributes:
        tensors: by layout.
        works: that fill them, on the host; None: done.
        event: behind what fills them, on a GPU.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    works: list[Any] = field(default_factory=list)
    event: Any = None

    def wait(self) -> None:
        """Wait until they are there: the host for gloo, the current stream for NCCL."""
        for work in self.works:
            if work is not None:
                work.wait()
        self.works.clear()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Sums of gradients that are being sent.

    Attributes:
        event: after which their memory is free.
    """

    sums: list[Tensor]
    event: Any


class RankedAccess(StoreAccess):
    """Executes the tape of a rank: leases of shares, and the collectives between them and the running model.

    Used by one thread, the one that runs the step.

    Args:
        collectives: of the ranks of the program.
        arguments: of ``StoreAccess``.
        named: of ``StoreAccess``.
    """

    own_phases: frozenset[Phase] = frozenset({"update", "gather", "exchange"})

    def __init__(self, collectives: Collectives, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        program = self._program
        shares, lanes = program.sharding.shares, program.sharding.lanes
        assert (collectives.rank, collectives.size) == (shares.rank, shares.size), shares
        assert (collectives.on_host is not None) == lanes.has_two_levels, lanes
        self._collectives = collectives
        self._device = torch.device("cpu")  # of the shares, once one was gathered
        self._place_of_weight: dict[str, tuple[str, int]] = {}  # key -> layout, part
        self._place_of_gradient: dict[str, tuple[str, int, int]] = {}  # key -> layout, use site, part
        for layout in self._graph.layouts.values():
            for part, key in enumerate(program.weight_keys(layout)):
                self._place_of_weight[key] = layout.name, part
            for use in range(len(self._uses_of_layouts[layout.name])):
                for part, key in enumerate(program.gradient_keys(layout, use)):
                    self._place_of_gradient[key] = layout.name, use, part
        self._side: Any = None  # on a GPU, the stream of collectives
        self._full: dict[tuple[Phase, int], deque[_FullCopies]] = {}  # by the ticks that they are for, in order
        self._turns: deque[deque[str]] = deque()  # groups of parts still to be gathered, exchanged, in the present tick
        self._leaving: list[_Leaving] = []  # what an exchange of before still sends
        self._sums: dict[tuple[str, int], list[Tensor]] = {}  # layout, use site -> a sum for each range of lanes
        self._partials: dict[tuple[str, int], Tensor] = {}  # layout, part -> squares of what this rank owns
        self._held_bytes = self._update_bytes = 0

    # -- the tape ----------------------------------------------------------------------------------------------

    def start_step(self, *arguments: Any, **named: Any) -> None:
        """Begin a step; see ``StoreAccess``."""
        if self._side is not None:  # a step that failed may have left work on either
            self._side.wait_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(self._side)
        self._full.clear()
        self._turns.clear()
        self._leaving.clear()
        self._sums.clear()
        self._partials.clear()
        self._held_bytes = self._update_bytes = 0
        super().start_step(*arguments, **named)

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Go to the op of a visit; what the visit before had is dropped first."""
        self._drop()
        super().begin(phase, visit)
        assert self._op is not None
        self._turns.extend(self._parts_in_turn(self._op))

    def end_step(self) -> None:
        """Run what comes last: exchanges and updates."""
        self._drop()
        super().end_step()
        self._drop_leaving()

    def _drop(self) -> None:
        """Drop the full copies of the visit that has ended, and the sums that were exchanged beside it."""
        if self._op is None:
            return
        self._come_to_group_of(None)
        self._drop_leaving()
        waiting = self._full.get((self._op.phase, self._op.visit))
        if waiting:
            full = waiting.popleft()
            if self._side is not None:
                self._side.wait_stream(torch.cuda.current_stream())  # it gathers into the same memory next
            self._note(-sum(map(_nbytes, full.tensors.values())))

    def _drop_leaving(self) -> None:
        for leaving in self._leaving:
            torch.cuda.current_stream().wait_event(leaving.event)  # the next sums are made in the same memory
            self._note(-sum(map(_nbytes, leaving.sums)))
        self._leaving.clear()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Queue what runs inside on the stream of collectives, behind what was queued before."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def _run(self, op: Op) -> None:
        if op.phase == "gather":
            self._gather(op)
        elif op.phase == "exchange":
            self._exchange(op)
        else:
            self._update(op)

    def _update(self, op: Op) -> None:
        if not self._program.updates.are_deferred:
            # The norm of a layer, and which parameters have a gradient, are known when all ranks have said theirs.
            layout = list(self._graph.layouts.values())[op.visit]
            self.agree([layout])
            if self._pending is not None and self._pending.scales is not None:
                self._pending.scales.is_complete(layout.name, self.squared_norms[layout.name])
        if op.visit in self._program.updates.dealt:
            self._update_dealt(op)
        else:
            super()._update(op)

    def _update_dealt(self, op: Op) -> None:
        """Update a layout of which matrices have to be whole for one step: those come to one rank each, and go back.

        All that moves does so also where a gradient, or that of a parameter, is not used: it does not depend on data.
        """
        assert self._updater is not None and self._pending is not None, f"no update to make: {op}"
        dealt, layout = self._program.updates.dealt[op.visit], self._updater.trained[op.visit][0]
        optimizer = self._updater.optimizers["ram"]
        assert isinstance(optimizer, MatrixOptimizer) and op.tier == "ram", (optimizer, op)
        update, filled = self._pending.of_layout(layout.name), self._pending.with_gradient[layout.name]
        move = self._collectives.redistribute
        with self._leases(self._own_keys(op, op.held)) as held:
            blocks, gradient, segments = self._updater.of_part(op.visit, 0, held, filled)
            packed = {name: blocks[name] for name in dealt.loans}
            lent = {name: torch.empty(loan.num_elements) for name, loan in dealt.loans.items()}
            self._note_update(sum(map(_nbytes, lent.values())))
            for name, loan in dealt.loans.items():
                self._note_update(0, move(lent[name], packed[name], loan.moves))
            blocks.update(lent)
            segments = [
                replace(
                    segment, state_starts={name: loan.starts.get(segment.name, 0) for name, loan in dealt.loans.items()}
                )
                for segment in segments
            ]
            directions = torch.zeros(dealt.length, dtype=torch.bfloat16)
            whole = torch.empty(dealt.num_own, dtype=torch.bfloat16)
            self._note_update(_nbytes(directions) + _nbytes(whole))
            if update is not None:
                optimizer.make_directions(blocks, gradient, segments, update, directions)
            self._note_update(0, move(whole, directions, dealt.directions))
            self._note_update(-_nbytes(directions))
            del directions
            if update is not None:
                self._orthogonalize(optimizer, dealt, whole, filled)
            directions = torch.zeros(dealt.length, dtype=torch.bfloat16)
            self._note_update(_nbytes(directions))
            self._note_update(0, move(directions, whole, dealt.directions.back))
            if update is not None:
                optimizer.apply_directions(blocks, gradient, segments, update, directions)
            self._note_update(-_nbytes(directions) - _nbytes(whole))
            del directions, whole
            for name, loan in dealt.loans.items():
                self._note_update(0, move(packed[name], lent[name], loan.moves.back))
            self._note_update(-sum(map(_nbytes, lent.values())))

    def _orthogonalize(
        self, optimizer: MatrixOptimizer, dealt: DealtLayout, whole: Tensor, filled: Collection[str]
    ) -> None:
        """Make this rank's matrices orthogonal in place: those with a gradient, as the others are not updated."""
        assert self._updater is not None and self._updater.matrices is not None
        ends = accumulate(matrix.numel for matrix in dealt.own)
        places = [
            whole[end - matrix.numel : end].view(matrix.rows, matrix.columns)
            for matrix, end in zip(dealt.own, ends, strict=True)
            if matrix.name in filled
        ]
        self._updater.matrices.make_in_place(optimizer, places)
        self._note_update(0, dealt.scratch_bytes if places else 0)

    def _note_update(self, nbytes: int, for_a_moment: int = 0) -> None:
        self._update_bytes += nbytes
        self.update_window_bytes = max(self.update_window_bytes, self._update_bytes + for_a_moment)

    def _note(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self.window_bytes = max(self.window_bytes, self._held_bytes)

    def _event(self) -> Any:
        """Return an event behind what is queued on the stream of collectives."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    # -- weights -----------------------------------------------------------------------------------------------

    def _gather(self, op: Op) -> None:
        """Gather full copies of weights for the tick that this one serves."""
        assert op.serves is not None, op
        program, keys = self._program, self._own_keys(op, op.held)
        names = dict.fromkeys(self._place_of_weight[key][0] for key in keys)
        full = _FullCopies()
        with self._beside():
            with self._leases(keys) as shares:
                self._find_device(shares[keys[0]].device)
                for layout in (self._graph.layouts[name] for name in names):
                    own = [shares[key] for key in program.weight_keys(layout)]
                    dtype = program.gathered_dtype(program.weight_keys(layout)[0])
                    copy = torch.empty(program.full_elements(layout), dtype=dtype, device=self._device)
                    self._note(_nbytes(copy))
                    full.tensors[layout.name] = copy
                    full.works.append(self._gather_parts(copy, program.weight_parts_of(layout), own))
            if self._side is not None:
                full.event = self._event()
        self._full.setdefault((op.serves, op.visit), deque()).append(full)

    def _gather_parts(self, copy: Tensor, parts: Sequence[range], own: Sequence[Tensor]) -> Any:
        """Gather the parts of a layout; return the work that goes on for the last of them, if any does.

        One after the other: where the shares of a part end in the next one, that is gathered over it. A share is copied
        first, an average rounded by it, and gathered in place, so that its lease need not wait for the others.
        """
        work: Any = None
        goes_on = self._program.sharding.gathers_ahead > 0 and self._side is None
        for number, (part, share) in enumerate(zip(parts, own, strict=True)):
            place = _within(copy, self._program.sharding.shares.gathered(part))
            work = self._gather_part(place, share, is_async=goes_on and number == len(parts) - 1)
        return work

    def _gather_part(self, place: Tensor, share: Tensor, *, is_async: bool = False) -> Any:
        """Gather a part into its place; return the work that goes on, if any does."""
        shares, num_beside = self._program.sharding.shares, self._program.sharding.lanes.shares_gathered_beside()
        mine = place.view(shares.size, -1)[shares.rank]
        mine.copy_(share)
        beside = torch.empty(num_beside * len(mine), dtype=mine.dtype, device=mine.device)
        self._note(_nbytes(beside))
        work = self._collectives.gather(place, mine, beside=beside, is_async=is_async)
        self._note(-_nbytes(beside))
        return work

    def _find_device(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda" and self._program.sharding.gathers_ahead and self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, Tensor | MatrixParts]]:
        """Yield the unit's parameters by full name: views of the full copies, and what passes by parts."""
        assert self._op is not None, "no op has begun, or the step is over"
        tensors: dict[str, Tensor | MatrixParts] = {}
        for name in layouts_of_unit(self._graph, unit.index):
            layout = self._graph.layouts[name]
            if self._program.passes_weight(visit, name):
                keys = self._program.weight_keys(layout)
                tensors[layout.entries[0].name] = LeasedParts(layout, keys, {}, self._part_of_weight)
            else:
                full = self._full[self._op.phase, self._op.visit][0]
                full.wait()
                tensors.update(views(full.tensors[name][: layout.num_elements], layout))
        yield tensors

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Take the weights all the same: others may need them, and all ranks gather together."""
        with self.weights(unit, visit):
            pass

    def note_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Fetch all the same."""

    # -- gradients ---------------------------------------------------------------------------------------------

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientSink]:
        """Yield the accumulators of this use site: fp32 sums over the micro-batches of this rank."""
        layouts = [self._graph.layouts[name] for name in layouts_of_unit(self._graph, unit.index)]
        layouts = [layout for layout in layouts if layout.trainable]
        by_part = [layout for layout in layouts if (visit, layout.name) in self._program.cuts.passing]
        layouts = [layout for layout in layouts if layout not in by_part]
        made: list[dict[str, Tensor]] = []  # for each open sum of lanes: memory by layout

        def room() -> GradientAccumulator:
            memory = {
                layout.name: torch.empty(self._program.full_elements(layout), dtype=torch.float32, device=self._device)
                for layout in layouts
            }
            self._note(sum(map(_nbytes, memory.values())))
            made.append(memory)
            targets: dict[str, Tensor] = {}
            for layout in layouts:
                targets.update(views(memory[layout.name][: layout.num_elements], layout))
            return GradientAccumulator(targets, set())

        accumulator = LaneAccumulator(self._program.sharding.own_lanes, room(), room)
        if by_part:
            passing: dict[str, PassingGradient] = {}
            for layout in by_part:
                keys = self._program.gradient_keys(layout, self._uses_of_layouts[layout.name].index(visit))
                passing[layout.entries[0].name] = PassingGradient(self, layout, visit, keys)
            sink = PartwiseAccumulator(accumulator if layouts else None, passing)
            yield sink
            sink.close()
        else:
            yield accumulator
        left = [None if each is None else each.added for _, each in accumulator.close()]
        while len(made) < len(left):  # no micro-batch has lanes there
            room()
        for memory in made[len(left) :]:
            self._note(-sum(map(_nbytes, memory.values())))
        for layout in layouts:
            use = self._uses_of_layouts[layout.name].index(visit)
            self._sums[layout.name, use] = [memory[layout.name] for memory in made[: len(left)]]
            names = {entry.name for entry in layout.entries}
            for sums, added in zip(self._sums[layout.name, use], left, strict=True):
                filled = names & (added or frozenset())
                self._filled_at(layout.name, visit).update(filled)
                zero_gaps([sums[: layout.num_elements]], (range(layout.num_elements),), layout, filled)

    def _exchange(self, op: Op) -> None:
        """Add up the sums of all ranks: each rank those of what it owns, which go to its blocks."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())  # which makes the sums
        sent: list[Tensor] = []
        with self._beside():
            for group in op.passing:
                keys = self._own_keys(op, group)
                name, use, part = self._place_of_gradient[keys[0]]
                parts = self._program.parts_of(self._graph.layouts[name])
                elements = self._program.sharding.shares.gathered(parts[part])
                with self._leases(keys) as tensors:
                    self._exchange_part(keys, tensors, [_within(each, elements) for each in self._sums[name, use]])
                if part == len(parts) - 1:
                    sent += self._sums.pop((name, use))
                    if self._side is None:
                        self._note(-sum(map(_nbytes, sent)))
                        sent.clear()
            if self._side is not None:
                self._leaving.append(_Leaving(sent, self._event()))

    def _exchange_part(self, keys: Sequence[str], tensors: Mapping[str, Tensor], sums: Sequence[Tensor]) -> None:
        """Fill the gradient of a part at one use site.

        Args:
            keys: the gradient's, and those of other use sites that are added to it.
            tensors: by key.
            sums: of this rank's ranges of lanes: the shares of all ranks, one after the other.
        """
        name, use, part = self._place_of_gradient[keys[0]]
        elements = self._program.parts_of(self._graph.layouts[name])[part]
        block, *others = (tensors[key] for key in keys)
        owned = len(self._program.sharding.shares.owned(elements))
        block.copy_(self._added(sums))
        block[owned:].zero_()  # the shares of a part end where others begin
        if use > 0:
            return
        # The backward reaches the first use site last: now those of all of them are complete.
        for other in others:
            if block.is_cuda:
                block.add_(other)
            else:
                sum_gradients(block, other, self._threads)
        self._partials[name, part] = partial_squares(block[:owned], self._threads)

    def _added(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the sum over all lanes of what this rank owns of a part.

        Args:
            sums: of this rank's ranges of lanes: the shares of all ranks, one after the other.
        """
        lanes = self._program.sharding.lanes
        on_host, across_hosts = self._collectives.on_host, self._collectives.across_hosts
        if on_host is None or across_hosts is None:
            of_ranks = [lanes.sums_of_rank(each) for each in range(lanes.size)]
            return total(0, lanes.count, self._received(self._collectives, sums, of_ranks), Tensor.add_)
        # The same tree: whole nodes of it are added up within each host, and the others between hosts.
        num_hosts, length = across_hosts.size, sums[0].numel() // lanes.size
        of_ranks = [lanes.sums_of_rank(each) for each in lanes.ranks_of_host(across_hosts.rank)]
        of_hosts = [lanes.sums_of_host(each) for each in range(num_hosts)]
        nodes = of_hosts[across_hosts.rank]
        between = torch.empty((len(nodes), num_hosts, length), dtype=torch.float32, device=sums[0].device)
        self._note(_nbytes(between))
        for host in range(num_hosts):  # whose shares are added up, each by this host's rank with the owner's number
            parts = [each.view(num_hosts, -1)[host] for each in sums]
            found = self._received(on_host, parts, of_ranks)
            for number, node in enumerate(nodes):
                between[number, host].copy_(total(*node, found, Tensor.add_))
            del found
        found = self._received(across_hosts, list(between.view(len(nodes), -1)), of_hosts)
        self._note(-_nbytes(between))
        return total(0, lanes.count, found, Tensor.add_)

    def _received(
        self, collectives: Collectives, sums: Sequence[Tensor], of_members: Sequence[Sequence[Subtree]]
    ) -> dict[Subtree, Tensor]:
        """Send sums to their owners; return by node of the tree what has come for this rank.

        Args:
            collectives: of the members.
            sums: of this one's nodes: what goes to each member, one after the other.
            of_members: the nodes that each of them has sums of.
        """
        length = sums[0].numel() // collectives.size
        received = torch.empty(sum(map(len, of_members)) * length, dtype=torch.float32, device=sums[0].device)
        self._note(_nbytes(received))
        found: dict[Subtree, Tensor] = {}
        start = 0
        for number in range(max(map(len, of_members))):
            lengths = [length * (number < len(nodes)) for nodes in of_members]
            stop = start + sum(lengths)
            own = sums[number] if number < len(sums) else received[:0]
            sent = [length * (number < len(sums))] * collectives.size
            collectives.exchange(received[start:stop], own, lengths, sent)
            rows = iter(received[start:stop].view(-1, length))
            found.update((nodes[number], next(rows)) for nodes in of_members if number < len(nodes))
            start = stop
        self._note(-_nbytes(received))
        return found

    # -- parts that pass within a tick ---------------------------------------------------------------------------

    def _parts_in_turn(self, op: Op) -> Iterator[deque[str]]:
        """Yield the parts that are gathered and exchanged while an op of the model runs, by group."""
        for group in op.passing:
            keys = zip(group, self._own_keys(op, group), strict=True)
            found = deque(
                key
                for use, key in keys
                if key in self._place_of_weight or (key in self._place_of_gradient and use.mode != "r")
            )
            if found:
                yield found

    def _come_to(self, key: str) -> None:
        """Gather and exchange what has its turn before a part, and was not asked for.

        So collectives do not hang on data: a rank may have no row for a part, or no gradient.
        """
        self._come_to_group_of(key)
        group = self._turns[0]
        while (turn := group.popleft()) != key:
            self._pass_unused(turn)
        if not group:
            self._turns.popleft()

    def _come_to_group_of(self, key: str | None) -> None:
        """Pass the groups before that of a part; None: all that are left."""
        while self._turns and key not in self._turns[0]:
            for turn in self._turns.popleft():
                self._pass_unused(turn)
        assert self._turns or key is None, f"{key} has no turn in {self._op}"

    def _pass_unused(self, key: str) -> None:
        with self._gathered_part(key) if key in self._place_of_weight else self._summed_part(key):
            pass

    @contextmanager
    def _within_tick(self) -> Iterator[None]:
        """Queue collectives between what the model has queued, and what it queues next."""
        if self._side is None:
            yield
            return
        # One stream for all collectives: they are in the same order on the device as on the tape.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream().wait_stream(self._side)

    @contextmanager
    def _part_of_weight(self, keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Gather a part of a weight in its turn."""
        (key,) = keys
        self._come_to(key)
        with self._gathered_part(key) as copy:
            yield {key: copy}

    @contextmanager
    def _gathered_part(self, key: str) -> Iterator[Tensor]:
        name, number = self._place_of_weight[key]
        part = self._program.weight_parts_of(self._graph.layouts[name])[number]
        with self._within_tick(), self._leases([key]) as shares:
            self._find_device(shares[key].device)
            length = len(self._program.sharding.shares.gathered(part))
            copy = torch.empty(length, dtype=self._program.gathered_dtype(key), device=self._device)
            self._note(_nbytes(copy))
            self._gather_part(copy, shares[key])
        yield copy
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())  # it gathers into the same memory next
        self._note(-_nbytes(copy))

    @contextmanager
    def gradient_part(self, layout: UnitLayout, visit: int, number: int, key: str) -> Iterator[list[Tensor]]:
        """Yield memory for the fp32 sums of one part of a gradient, which are exchanged afterwards."""
        self._come_to_group_of(key)
        with self._summed_part(key, before=lambda: self._come_to(key)) as sums:
            yield sums

    @contextmanager
    def _summed_part(self, key: str, before: Callable[[], None] = lambda: None) -> Iterator[list[Tensor]]:
        """Yield zeros for the sums of a part, and exchange them.

        Args:
            key: of the gradient.
            before: runs before the exchange, when the sums are complete.
        """
        name, use, number = self._place_of_gradient[key]
        layout = self._graph.layouts[name]
        part = self._program.parts_of(layout)[number]
        shape = len(self._program.sharding.own_lanes.subtrees), len(self._program.sharding.shares.gathered(part))
        memory = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._note(_nbytes(memory))
        yield [each[: len(part)] for each in memory]
        before()
        others = range(1, len(self._uses_of_layouts[name])) if use == 0 else ()
        keys = [key, *(self._program.gradient_keys(layout, other)[number] for other in others)]
        with self._within_tick(), self._leases(keys) as tensors:
            self._exchange_part(keys, tensors, list(memory))
        self._note(-_nbytes(memory))

    @contextmanager
    def open_sums(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield what makes memory for open sums, counted as long as these are open."""
        made = 0

        def make(like: Tensor) -> Tensor:
            nonlocal made
            memory = torch.empty_like(like)
            made += _nbytes(memory)
            self._note(_nbytes(memory))
            return memory

        yield make
        self._note(-made)

    # -- what all ranks have to know ---------------------------------------------------------------------------

    def agree(
        self, layouts: Sequence[UnitLayout], terms: Sequence[Tensor] = (), figures: Sequence[CountedTotal] = ()
    ) -> tuple[list[float], list[tuple[str, float, int]]]:
        """Tell all ranks of complete gradients: afterwards norms, and what got a gradient, are those of all lanes.

        Waits for all ranks, and for the device.

        Args:
            layouts: Those whose gradients are complete, the same on all ranks; norms that all know already stay.
            terms: Scalars whose sum is this rank's loss.
            figures: What this rank's losses tell of their micro-batches.

        Returns:
            The terms and figures of all ranks, in the order of their micro-batches.
        """
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        layouts = [layout for layout in layouts if layout.name not in self.squared_norms]
        places = [(layout, part) for layout in layouts for part in range(len(self._program.parts_of(layout)))]
        partials = [self._partials.pop((layout.name, part)) for layout, part in places]
        numbers = _on_host([*terms, *(torch.as_tensor(sum_) for _, sum_, _ in figures), *partials])
        filled = {layout.name: set().union(*self._filled[layout.name].values()) for layout in layouts}
        told = [(name, count) for name, _, count in figures]
        records = self._collectives.gather_objects((len(terms), told, numbers.numpy(), filled))
        found = [torch.from_numpy(of_rank) for _, _, of_rank, _ in records]
        positions = [count + len(of_rank) for count, of_rank, _, _ in records]
        shares = self._program.sharding.shares
        for layout in layouts:
            squares: list[Tensor] = []
            for part in self._program.parts_of(layout):
                for rank, of_rank in enumerate(found):
                    count = -(-len(shares.owned(part, rank)) // SHARE_BLOCK_ELEMENTS)
                    squares.append(of_rank[positions[rank] : positions[rank] + count])
                    positions[rank] += count
            self.squared_norms[layout.name] = add_in_order(torch.cat(squares))
            self.with_gradient[layout.name] = set().union(*(names[layout.name] for *_, names in records))
        all_terms: list[float] = []
        all_figures: list[tuple[str, float, int]] = []
        for count, described, of_rank, _ in records:
            all_terms += of_rank[:count].tolist()
            for (name, weight), number in zip(described, of_rank[count:].tolist(), strict=False):
                all_figures.append((name, number, weight))
        return all_terms, all_figures


def _on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Return numbers in double precision on the host, in order: those on a device with one copy and one host sync."""
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    numbers = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
    if not numbers.is_cuda:
        return numbers
    host, arrived = sent_to_host(numbers)
    arrived.synchronize()
    return host


def _within(tensor: Tensor, elements: range) -> Tensor:
    return tensor[elements.start : elements.stop]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def describe_collectives(program: StepProgram, num_micro_batches: int) -> list[str]:
    """Return what must be the same on all ranks for a step of theirs to end, and to have the bits of one process.

    Where blocks have their homes may differ: it changes no order. So may how many micro-batches a rank has.
    """
    lanes = program.sharding.lanes
    lines = [
        f"{lanes.size} ranks on {lanes.num_hosts} hosts, {lanes.count} lanes of {num_micro_batches} micro-batches",
        f"graphs kept of visits {sorted(program.recompute.kept_graphs)}",
        "updates after the norm of a whole step" if program.updates.are_deferred else "updates in the backward",
    ]
    for number, tick in enumerate(program.ticks):
        # Other deferred updates issue no collective, and where they stand depends on what a rank has room for.
        dealt = program.updates.dealt.get(tick.visit) if tick.phase == "update" else None
        if tick.phase == "update" and program.updates.are_deferred and dealt is None:
            continue
        blocks = [program.contents(number, key) for key, _ in tick.uses]
        sizes = [f"{each.key} [{each.num_elements}] {each.dtype}" for each in blocks if each.kind != "activations"]
        moved = "" if dealt is None else dealt.describe()
        lines.append(" ".join([f"{tick.phase} {tick.visit}", tick.serves or "", *sizes, moved]))
    return lines
