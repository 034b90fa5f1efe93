"""Steps on several ranks. Every rank owns a shard of each block and computes some of the micro-batches.

`Ranks` implements the executor's hooks (`leased.ShardingHooks`) for a process whose blocks hold shards. The running
model gets full copies of weights, gathered from the shards of all ranks. Its gradients are summed in separate memory.
An exchange splits the sums into shards and adds the shards in the order of lanes (`ranks/lanes.py`). Shards are leased,
updated and moved like whole blocks. Full copies and sums are workspace, planned by `workspace.collective_transients`.

The program's ticks determine all collectives, because the model's requests depend on the data. Passing parts of the
vocabulary are gathered, and their gradients exchanged, within the visit's own tick. Each part has a turn in the tick,
even if the model does not request the part (`PartOrder`).

If the program gathers ahead (`Sharding.gathers_ahead`), collectives run concurrently with the layers. On a GPU they use
a separate stream. The two streams wait for each other on the device, without blocking the host. Memory is freed only
after both streams have finished with it, so the counted bytes of copies and sums are exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.base.layout import SplitTensor, views, views_of_parts
from megatrain.engine.device.host_io import sent_to_host
from megatrain.engine.head.loss import PartialMean
from megatrain.engine.tape.leased import ShardingHooks, WeightPlace
from megatrain.engine.tape.pieces import LeasedParts, zero_gaps
from megatrain.engine.unit.weight_gradients import GradientAccumulator, LaneAccumulator
from megatrain.optim.clip import add_in_order, partial_squares
from megatrain.ranks.lanes import total
from megatrain.ranks.shards import SHARD_BLOCK_ELEMENTS

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.engine.program.block_access import MatrixParts
    from megatrain.engine.program.step_program import Phase, StepProgram
    from megatrain.engine.tape.execution import TapeExecution
    from megatrain.engine.tape.gradients import StepGradients
    from megatrain.engine.tape.leased import HostResults
    from megatrain.engine.tape.tape import Op
    from megatrain.ranks.collectives import Collectives
    from megatrain.ranks.lanes import Subtree


class Ranks(ShardingHooks):
    """Hooks for a process that owns shards of blocks and computes with full copies.

    Used only by the thread that runs the step.
    """

    def __init__(self, collectives: Collectives, execution: TapeExecution, gradients: StepGradients) -> None:
        program = execution.model.program
        shards = program.sharding.shards
        assert (collectives.rank, collectives.size) == (shards.rank, shards.size), shards
        self._collectives, self._program = collectives, program
        self._execution, self._step_gradients = execution, gradients
        self.window = RankWindow(program)
        self._turns = PartOrder(self._pass_unused)
        self.weights: FullCopies = FullCopies(collectives, execution, self.window, self._turns)
        self.gradients: ExchangedGradients = ExchangedGradients(
            collectives, execution, gradients, self.window, self._turns
        )

    @property
    def window_bytes(self) -> int:
        """Peak total bytes of full copies, sums and received data."""
        return self.window.peak_bytes

    def start_step(self) -> None:
        """Drop the state of a previous step that may have failed."""
        self.window.start_step()
        self.weights.start_step()
        self._turns.clear()
        self.gradients.start_step()

    def before_visit(self, op: Op) -> None:
        """Record the parts that have a turn during the visit."""
        self._turns.begin(self._parts_in_turn(op))

    def after_visit(self) -> None:
        """Drop the finished visit's full copies, and the sums that an exchange sent during the visit."""
        op = self._execution.op
        if op is None:
            return
        # Finish the remaining turns first, because they use this op's blocks and all ranks finish them here.
        self._turns.pass_all(op)
        self.gradients.drop_sent_sums()
        self.weights.drop(op)

    def end_step(self) -> None:
        """Drop the sums that the last exchange sent."""
        self.gradients.drop_sent_sums()

    def run(self, op: Op) -> None:
        """Run a gather op or an exchange op."""
        if op.phase == "gather":
            self.weights.gather(op)
        else:
            assert op.phase == "exchange", op
            self.gradients.exchange(op)

    def before_update(self, layout: UnitLayout) -> None:
        """Combine the ranks' gradient norms of a layer, and the sets of its parameters that have a gradient."""
        self.collect_results([layout], (), ())

    def collect_results(
        self, layouts: Sequence[UnitLayout], terms: Sequence[Tensor], figures: Sequence[PartialMean]
    ) -> Callable[[], HostResults]:
        """Exchange the results of all ranks immediately; see ``ShardingHooks``. Waits for all ranks and for the device.

        Args:
            layouts: Layouts with complete gradients, the same on all ranks. Layouts with a known norm are skipped.
            terms: Scalars whose sum is this rank's loss.
            figures: This rank's contributions to the metrics of the loss.
        """
        self.window.wait_for_collectives()
        known, shards = self._step_gradients.squared_norms, self._program.sharding.shards
        layouts = [layout for layout in layouts if layout.name not in known]
        partials = [each for layout in layouts for each in self.gradients.take_partials(layout)]
        numbers = _concatenate_on_host([*terms, *(torch.as_tensor(figure.total) for figure in figures), *partials])
        filled = {layout.name: self._step_gradients.filled(layout.name) for layout in layouts}
        counts = [(figure.name, figure.count) for figure in figures]
        records = self._collectives.gather_objects((len(terms), counts, numbers.numpy(), filled))
        found = [torch.from_numpy(of_rank) for _, _, of_rank, _ in records]
        positions = [count + len(of_rank) for count, of_rank, _, _ in records]
        for layout in layouts:
            squares: list[Tensor] = []
            # Iterate by part, then by rank. This is the order of elements, so the sum is bit-identical to one process.
            for part in self._program.parts_of(layout):
                for rank, of_rank in enumerate(found):
                    count = -(-len(shards.owned_range(part, rank)) // SHARD_BLOCK_ELEMENTS)
                    squares.append(of_rank[positions[rank] : positions[rank] + count])
                    positions[rank] += count
            of_all = set[str]().union(*(names[layout.name] for *_, names in records))
            self._step_gradients.record_complete(layout.name, add_in_order(torch.cat(squares)), of_all)
        all_terms: list[float] = []
        all_figures: list[PartialMean] = []
        for count, described, of_rank, _ in records:
            all_terms += of_rank[:count].tolist()
            for (name, weight), number in zip(described, of_rank[count:].tolist(), strict=False):
                all_figures.append(PartialMean(name, number, weight))
        return lambda: (all_terms, all_figures)

    def _parts_in_turn(self, op: Op) -> Iterator[deque[str]]:
        """Yield the keys of the parts to gather or exchange while a visit's op runs, one deque per group."""
        for group in op.passing:
            keys = zip(group, self._execution.content_keys(op, group), strict=True)
            found = deque(
                key for use, key in keys if self.weights.has(key) or (self.gradients.has(key) and use.mode != "r")
            )
            if found:
                yield found

    def _pass_unused(self, key: str) -> None:
        with self.weights.part(key) if self.weights.has(key) else self.gradients.summed_part(key):
            pass


class RankWindow:
    """Memory counter and GPU stream for the collectives.

    Attributes:
        device: Device of the leased shards, known after the first gather.
        side: GPU stream for collectives that run concurrently with the layers; None if there is no such stream.
        live_bytes: Current total bytes of full copies, sums and received data.
    """

    def __init__(self, program: StepProgram) -> None:
        self._gathers_ahead = program.sharding.gathers_ahead > 0
        self.device = torch.device("cpu")
        self.side: Any = None
        self.live_bytes = self.peak_bytes = 0

    def start_step(self) -> None:
        """Reset the counter. Make both streams wait for each other, because a failed step may have left work queued."""
        self.live_bytes = 0
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(self.side)

    def find_device(self, device: torch.device) -> None:
        """Record the device of the leased shards."""
        self.device = device
        if device.type == "cuda" and self._gathers_ahead and self.side is None:
            self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def count(self, nbytes: int) -> None:
        """Count allocated bytes. Pass a negative number for freed bytes."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def wait_for_model(self) -> None:
        """Make later collectives wait, on the device, for the work that the model has queued."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())

    def wait_for_collectives(self) -> None:
        """Make the model's later work wait, on the device, for the queued collectives."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Queue all work of the context on the collectives' stream, if there is one."""
        if self.side is None:
            yield
            return
        with torch.cuda.stream(self.side):
            yield

    @contextmanager
    def within_tick(self) -> Iterator[None]:
        """Queue the context's collectives between the work that the model has queued and its later work."""
        # All collectives use one stream, so the device runs them in tape order.
        self.wait_for_model()
        with self.on_side_stream():
            yield
        self.wait_for_collectives()

    def event(self) -> Any:
        """Record and return an event on the collectives' stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.side)
        return event


class PartOrder:
    """Order in which a tick gathers weight parts and exchanges gradient parts, one part at a time.

    The order does not depend on data: a part has a turn even if a rank has no rows or no gradient for the part.

    Args:
        pass_unused: Function that gathers or exchanges a part that the model did not request, given the part's key.
    """

    def __init__(self, pass_unused: Callable[[str], None]) -> None:
        self._pass_unused = pass_unused
        self._groups: deque[deque[str]] = deque()  # remaining turns of the current tick

    def clear(self) -> None:
        """Drop the remaining parts of a failed step."""
        self._groups.clear()

    def begin(self, groups: Iterator[deque[str]]) -> None:
        """Start a new tick, whose parts have these keys."""
        self._groups.extend(groups)

    def advance_to(self, key: str, op: Op) -> None:
        """Advance to a part's turn. First gather or exchange all earlier parts, which the model did not request."""
        self.advance_to_group_of(key, op)
        group = self._groups[0]
        while (turn := group.popleft()) != key:
            self._pass_unused(turn)
        if not group:
            self._groups.popleft()

    def advance_to_group_of(self, key: str, op: Op) -> None:
        """Gather or exchange all remaining parts that come before a part's group."""
        self._pass_groups(key)
        assert self._groups, f"{key} has no turn in {op}"

    def pass_all(self, op: Op) -> None:
        """Gather or exchange all remaining parts of an op's tick."""
        self._pass_groups(None)

    def _pass_groups(self, before: str | None) -> None:
        while self._groups and before not in self._groups[0]:
            for turn in self._groups.popleft():
                self._pass_unused(turn)


@dataclass(slots=True)
class _CopiesOfTick:
    """Full copies of the weights that one tick uses.

    Attributes:
        works: Asynchronous operations that fill the copies; None for an operation that is already finished.
        event: Event on a GPU, recorded after the operations that fill the copies.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    works: list[Any] = field(default_factory=list)
    event: Any = None

    def wait(self) -> None:
        """Wait for the copies. With gloo, the host waits; with NCCL, the current stream waits."""
        for work in self.works:
            if work is not None:
                work.wait()
        self.works.clear()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@dataclass(frozen=True, slots=True)
class _ExchangedSums:
    """Gradient sums that an exchange is sending, and the event that marks the end of the exchange."""

    sums: list[Tensor]
    event: Any


class FullCopies(WeightPlace):
    """``WeightPlace`` that provides full copies of weights, gathered from the shards of all ranks."""

    def __init__(
        self, collectives: Collectives, execution: TapeExecution, window: RankWindow, turns: PartOrder
    ) -> None:
        self._collectives, self._execution, self._window, self._turns = collectives, execution, window, turns
        self._graph, self._program = execution.model.graph, execution.model.program
        self._places: dict[str, tuple[str, int]] = {}  # key -> layout, part
        for layout in self._graph.layouts.values():
            for part, key in enumerate(self._program.weight_keys(layout)):
                self._places[key] = layout.name, part
        self._full: dict[tuple[Phase, int], deque[_CopiesOfTick]] = {}  # tick that needs them -> copies, in order

    def start_step(self) -> None:
        """Drop the copies of a failed step."""
        self._full.clear()

    def has(self, key: str) -> bool:
        """Return whether a key belongs to a weight."""
        return key in self._places

    def gather(self, op: Op) -> None:
        """Gather the full copies of weights that a later visit needs."""
        assert op.serves is not None, op
        program, keys = self._program, self._execution.content_keys(op, op.held)
        names = dict.fromkeys(self._places[key][0] for key in keys)
        full = _CopiesOfTick()
        with self._window.on_side_stream():
            with self._execution.lease(keys) as shards:
                self._window.find_device(shards[keys[0]].device)
                for layout in (self._graph.layouts[name] for name in names):
                    own = [shards[key] for key in program.weight_keys(layout)]
                    dtype = program.gathered_dtype(program.weight_keys(layout)[0])
                    copy = torch.empty(program.full_elements(layout), dtype=dtype, device=self._window.device)
                    self._window.count(copy.nbytes)
                    full.tensors[layout.name] = copy
                    full.works.append(self._gather_parts(copy, program.weight_parts_of(layout), own))
            if self._window.side is not None:
                full.event = self._window.event()
        self._full.setdefault((op.serves, op.visit), deque()).append(full)

    def _gather_parts(self, copy: Tensor, parts: Sequence[range], own: Sequence[Tensor]) -> Any:
        """Gather the parts of a layout. Return the last part's operation if it is asynchronous.

        Parts are gathered in order, because a part's padding can extend into the next part, which then overwrites it.
        Each shard is copied before the gather, so the shard's lease need not wait for other ranks. The copy also rounds
        averages to the compute dtype.
        """
        work: Any = None
        goes_on = self._program.sharding.gathers_ahead > 0 and self._window.side is None
        for number, (part, shard) in enumerate(zip(parts, own, strict=True)):
            place = _slice(copy, self._program.sharding.shards.gathered_range(part))
            work = self._gather_part(place, shard, is_async=goes_on and number == len(parts) - 1)
        return work

    def _gather_part(self, place: Tensor, shard: Tensor, *, is_async: bool = False) -> Any:
        """Gather a part into ``place``. Return the operation if it is asynchronous."""
        shards = self._program.sharding.shards
        mine = place.view(shards.size, -1)[shards.rank]
        mine.copy_(shard)
        return self._collectives.gather(place, mine, is_async=is_async)

    def drop(self, op: Op) -> None:
        """Drop the full copies of a finished visit."""
        waiting = self._full.get((op.phase, op.visit))
        if waiting:
            full = waiting.popleft()
            self._window.wait_for_model()  # wait, because the next gather reuses the memory
            self._window.count(-sum(each.nbytes for each in full.tensors.values()))

    @contextmanager
    def for_visit(self, layouts: Sequence[UnitLayout], visit: int) -> Iterator[Mapping[str, Tensor | MatrixParts]]:
        """Yield parameters as views of full copies, or as parts to gather one at a time; see ``WeightPlace``."""
        op = self._execution.current_op
        tensors: dict[str, Tensor | MatrixParts] = {}
        for layout in layouts:
            if self._program.passes_weight(visit, layout.name):
                keys = self._program.weight_keys(layout)
                tensors[layout.entries[0].name] = LeasedParts(layout, keys, {}, self._part_in_turn)
            else:
                full = self._full[op.phase, op.visit][0]
                full.wait()
                tensors.update(views(full.tensors[layout.name][: layout.num_elements], layout))
        yield tensors

    def skip(self, layouts: Sequence[UnitLayout], visit: int) -> None:
        """Wait for the full copies without using them. Gathers are collective, and other ranks may need the weights."""
        with self.for_visit(layouts, visit):
            pass

    @contextmanager
    def _part_in_turn(self, keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Gather a part of a weight when its turn comes."""
        (key,) = keys
        self._turns.advance_to(key, self._execution.current_op)
        with self.part(key) as copy:
            yield {key: copy}

    @contextmanager
    def part(self, key: str) -> Iterator[Tensor]:
        """Gather a part of a weight. Call this only when it is the part's turn."""
        name, number = self._places[key]
        part = self._program.weight_parts_of(self._graph.layouts[name])[number]
        with self._window.within_tick(), self._execution.lease([key]) as shards:
            self._window.find_device(shards[key].device)
            length = len(self._program.sharding.shards.gathered_range(part))
            copy = torch.empty(length, dtype=self._program.gathered_dtype(key), device=self._window.device)
            self._window.count(copy.nbytes)
            self._gather_part(copy, shards[key])
        yield copy
        self._window.wait_for_model()  # wait, because the next gather reuses the memory
        self._window.count(-copy.nbytes)


class ExchangedGradients:
    """``GradientPlace`` that sums gradients in separate memory, then exchanges the sums between ranks.

    Each rank adds up all ranks' sums for the shards that it owns.
    """

    def __init__(
        self,
        collectives: Collectives,
        execution: TapeExecution,
        gradients: StepGradients,
        window: RankWindow,
        turns: PartOrder,
    ) -> None:
        self._collectives, self._execution, self._gradients = collectives, execution, gradients
        self._window, self._turns = window, turns
        self._graph, self._program = execution.model.graph, execution.model.program
        self._places: dict[str, tuple[str, int, int]] = {}  # key -> layout, use site, part
        for layout in self._graph.layouts.values():
            for use in range(len(gradients.uses[layout.name])):
                for part, key in enumerate(self._program.gradient_keys(layout, use)):
                    self._places[key] = layout.name, use, part
        self._sending: list[_ExchangedSums] = []  # sums that an exchange is sending
        self._sums: dict[tuple[str, int], list[Tensor]] = {}  # layout, use site -> one sum per range of lanes
        self._partials: dict[tuple[str, int], Tensor] = {}  # layout, part -> partial sums of squares

    def start_step(self) -> None:
        """Drop the sums of a failed step."""
        self._sending.clear()
        self._sums.clear()
        self._partials.clear()

    def has(self, key: str) -> bool:
        """Return whether a key belongs to a gradient."""
        return key in self._places

    def take_partials(self, layout: UnitLayout) -> list[Tensor]:
        """Remove and return partial sums of squares for this rank's shards of a gradient, by part."""
        return [self._partials.pop((layout.name, part)) for part in range(len(self._program.parts_of(layout)))]

    def drop_sent_sums(self) -> None:
        """Drop the sums that earlier exchanges sent."""
        for leaving in self._sending:
            torch.cuda.current_stream().wait_event(leaving.event)  # wait, because the next sums reuse the memory
            self._window.count(-sum(each.nbytes for each in leaving.sums))
        self._sending.clear()

    @contextmanager
    def held(self, layouts: Sequence[UnitLayout], visit: int) -> Iterator[LaneAccumulator]:
        """Yield fp32 sums over this rank's micro-batches. A later op exchanges the sums; see ``GradientPlace``."""
        made: list[dict[str, Tensor]] = []  # memory by layout, for each open sum of lanes

        def make_accumulator() -> GradientAccumulator:
            memory = {
                layout.name: torch.empty(
                    self._program.full_elements(layout), dtype=torch.float32, device=self._window.device
                )
                for layout in layouts
            }
            self._window.count(sum(each.nbytes for each in memory.values()))
            made.append(memory)
            targets: dict[str, Tensor | SplitTensor] = {}
            for layout in layouts:
                # Use the same pieces as a single process, because matmuls of different shapes can round differently.
                parts = self._program.parts_of(layout)
                targets.update(views_of_parts([_slice(memory[layout.name], part) for part in parts], parts, layout))
            return GradientAccumulator(targets, set())

        accumulator = LaneAccumulator(self._gradients.lanes, make_accumulator(), make_accumulator)
        yield accumulator
        left = [None if each is None else each.added for _, each in accumulator.close()]
        while len(made) < len(left):  # lanes without a micro-batch
            make_accumulator()
        for memory in made[len(left) :]:
            self._window.count(-sum(each.nbytes for each in memory.values()))
        for layout in layouts:
            use = self._gradients.use_of(layout.name, visit)
            self._sums[layout.name, use] = [memory[layout.name] for memory in made[: len(left)]]
            names = {entry.name for entry in layout.entries}
            for sums, added in zip(self._sums[layout.name, use], left, strict=True):
                filled = names & (added or frozenset())
                self._gradients.record_filled(layout.name, visit, filled)
                zero_gaps([sums[: layout.num_elements]], (range(layout.num_elements),), layout, filled)

    def exchange(self, op: Op) -> None:
        """Exchange gradient sums. Each rank adds up and stores the sums for the shards that it owns."""
        self._window.wait_for_model()  # wait until the model has computed the sums
        sent: list[Tensor] = []
        with self._window.on_side_stream():
            for group in op.passing:
                keys = self._execution.content_keys(op, group)
                name, use, part = self._places[keys[0]]
                parts = self._program.parts_of(self._graph.layouts[name])
                elements = self._program.sharding.shards.gathered_range(parts[part])
                with self._execution.lease(keys) as tensors:
                    self._exchange_part(keys, tensors, [_slice(each, elements) for each in self._sums[name, use]])
                if part == len(parts) - 1:
                    sent += self._sums.pop((name, use))
                    if self._window.side is None:
                        self._window.count(-sum(each.nbytes for each in sent))
                        sent.clear()
            if self._window.side is not None:
                self._sending.append(_ExchangedSums(sent, self._window.event()))

    def _exchange_part(self, keys: Sequence[str], tensors: Mapping[str, Tensor], sums: Sequence[Tensor]) -> None:
        """Sum a part's gradient at one use site over all ranks, and store this rank's shard.

        Args:
            keys: Key of the gradient, followed by the keys of other use sites' gradients to add.
            sums: One sum per range of this rank's lanes. Each contains the concatenated shards of all ranks.
        """
        name, use, part = self._places[keys[0]]
        elements = self._program.parts_of(self._graph.layouts[name])[part]
        block, *others = (tensors[key] for key in keys)
        owned = len(self._program.sharding.shards.owned_range(elements))
        block.copy_(self._added(sums))
        # Zero the padding, because the sums contain elements of the next part there.
        block[owned:].zero_()
        if use > 0:
            return
        # The backward reaches the first use site last, so the sums of all sites are now complete.
        self._gradients.add_uses(block, others)
        self._partials[name, part] = partial_squares(block[:owned], self._gradients.threads)

    def _added(self, sums: Sequence[Tensor]) -> Tensor:
        """Exchange sums, and return the sum over all lanes for this rank's shard of a part.

        Args:
            sums: One sum [ranks * N] per range of this rank's lanes, containing the concatenated shards of all ranks.
        """
        lanes = self._program.sharding.lanes
        of_ranks = [lanes.rank_sums(each) for each in range(lanes.size)]
        length = sums[0].numel() // lanes.size
        received = torch.empty(lanes.num_sums * length, dtype=torch.float32, device=sums[0].device)
        self._window.count(received.nbytes)
        found: dict[Subtree, Tensor] = {}
        start = 0
        for number in range(max(map(len, of_ranks))):
            lengths = [length * (number < len(nodes)) for nodes in of_ranks]
            stop = start + sum(lengths)
            own = sums[number] if number < len(sums) else received[:0]
            sent = [length * (number < len(sums))] * lanes.size
            self._collectives.exchange(received[start:stop], own, lengths, sent)
            rows = iter(received[start:stop].view(-1, length))
            found.update((nodes[number], next(rows)) for nodes in of_ranks if number < len(nodes))
            start = stop
        self._window.count(-received.nbytes)
        return total(0, lanes.count, found, Tensor.add_)

    @contextmanager
    def part(self, layout: UnitLayout, visit: int, number: int, key: str) -> Iterator[list[Tensor]]:
        """Yield memory for the sums of a gradient's part. On exit, exchange them in turn; see ``GradientPlace``."""
        op = self._execution.current_op
        self._turns.advance_to_group_of(key, op)
        with self.summed_part(key, before=lambda: self._turns.advance_to(key, op)) as sums:
            yield sums

    @contextmanager
    def summed_part(self, key: str, before: Callable[[], None] = lambda: None) -> Iterator[list[Tensor]]:
        """Yield zeroed memory for the sums of one part of a gradient. Exchange the sums on exit.

        Args:
            before: Function called after the sums are complete and before the exchange.
        """
        name, use, number = self._places[key]
        layout = self._graph.layouts[name]
        part = self._program.parts_of(layout)[number]
        shape = len(self._gradients.lanes.subtrees), len(self._program.sharding.shards.gathered_range(part))
        memory = torch.zeros(shape, dtype=torch.float32, device=self._window.device)
        self._window.count(memory.nbytes)
        yield [each[: len(part)] for each in memory]
        before()
        others = range(1, len(self._gradients.uses[name])) if use == 0 else ()
        keys = [key, *(self._program.gradient_keys(layout, other)[number] for other in others)]
        with self._window.within_tick(), self._execution.lease(keys) as tensors:
            self._exchange_part(keys, tensors, list(memory))
        self._window.count(-memory.nbytes)

    @contextmanager
    def open_sums(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a function that allocates open sums. Their memory is counted until exit; see ``GradientPlace``."""
        made = 0

        def make(like: Tensor) -> Tensor:
            nonlocal made
            memory = torch.empty_like(like)
            made += memory.nbytes
            self._window.count(memory.nbytes)
            return memory

        yield make
        self._window.count(-made)


def _concatenate_on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors in double precision on the host. Tensors on a device need one copy and one host sync."""
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    numbers = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
    if not numbers.is_cuda:
        return numbers
    host, arrived = sent_to_host(numbers)
    arrived.synchronize()
    return host


def _slice(tensor: Tensor, elements: range) -> Tensor:
    return tensor[elements.start : elements.stop]


def parts_of_program(program: StepProgram, num_micro_batches: int) -> dict[str, str]:
    """Return the properties on which all ranks must agree, by name. They determine the order of collectives.

    Homes of blocks can differ between ranks, because they do not affect this order.
    """
    lanes, updates = program.sharding.lanes, program.updates
    parts = {
        "sum of gradients": f"{lanes.count} lanes of {num_micro_batches} micro-batches, {lanes.num_hosts} hosts",
        "kept graphs": str(sorted(program.recompute.kept_graphs)),
        "updates": "after the norm of a whole step" if updates.are_deferred else "in the backward",
    }
    for number, tick in enumerate(program.ticks):
        # Skip deferred updates: they issue no collectives, and their position depends on the memory of each rank.
        if tick.phase != "update" or not updates.are_deferred:
            blocks = [program.contents(number, key) for key, _ in tick.uses]
            sizes = [f"{each.key} [{each.num_elements}] {each.dtype}" for each in blocks if each.kind != "activations"]
            parts[f"op {len(parts)}"] = " ".join([f"{tick.phase} {tick.visit}", tick.serves or "", *sizes])
    return parts
