"""Steps on several ranks. Every rank owns a shard of each block and computes some of the micro-batches.

`Ranks` implements the executor's hooks (`leased.ShardingHooks`) for a process whose blocks hold shards. The running
model gets full copies of weights, gathered from the shards of all ranks. Its gradients are summed in separate memory.
An exchange splits the sums into shards and adds the shards in the order of lanes (`ranks/lanes.py`). Shards are leased,
updated and moved like whole blocks. Full copies and sums are workspace, planned by `workspace.collective_transients`.

All ranks must run the same collectives. The program's ticks determine them, because the model's requests depend on
data. Passing parts of the vocabulary are gathered, and their gradients exchanged, within the visit's own tick. Each
part has a turn in the tick, even if the model does not request the part (`PartOrder`).

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
from megatrain.engine.device.host_io import copy_to_host
from megatrain.engine.head.loss import PartialMean
from megatrain.engine.tape.leased import ShardingHooks, WeightProvider
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
        self._turns = PartOrder(self._process_unused)
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
        self._turns.begin(self._turn_keys(op))

    def after_visit(self) -> None:
        """Drop the finished visit's full copies, and the sums that an exchange sent during the visit."""
        op = self._execution.op
        if op is None:
            return
        # Finish the remaining turns first, because they lease this op's blocks and other ranks also finish them here.
        self._turns.finish_turns(op)
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
        self, layouts: Sequence[UnitLayout], terms: Sequence[Tensor], metrics: Sequence[PartialMean]
    ) -> Callable[[], HostResults]:
        """Exchange the results of all ranks immediately; see ``ShardingHooks``. Waits for all ranks and for the device.

        Args:
            layouts: Layouts with complete gradients, the same on all ranks. Layouts with a known norm are skipped.
            terms: Scalars whose sum is this rank's loss.
            metrics: This rank's contributions to the metrics of the loss.
        """
        self.window.wait_for_collectives()
        squared_norms, shards = self._step_gradients.squared_norms, self._program.sharding.shards
        layouts = [layout for layout in layouts if layout.name not in squared_norms]
        partials = [partial for layout in layouts for partial in self.gradients.take_partials(layout)]
        values = _concatenate_on_host([*terms, *(torch.as_tensor(metric.total) for metric in metrics), *partials])
        filled_sets = {layout.name: self._step_gradients.filled_params(layout.name) for layout in layouts}
        counts = [(metric.name, metric.count) for metric in metrics]
        records = self._collectives.gather_objects((len(terms), counts, values.numpy(), filled_sets))
        rank_values = [torch.from_numpy(record_values) for _, _, record_values, _ in records]
        positions = [count + len(record_values) for count, record_values, _, _ in records]
        for layout in layouts:
            squares: list[Tensor] = []
            # Iterate by part, then by rank. This is the order of elements, so the sum is bit-identical to one process.
            for part in self._program.layout_parts(layout):
                for rank, record_values in enumerate(rank_values):
                    count = -(-len(shards.owned_range(part, rank)) // SHARD_BLOCK_ELEMENTS)
                    squares.append(record_values[positions[rank] : positions[rank] + count])
                    positions[rank] += count
            filled_params = set[str]().union(*(names[layout.name] for *_, names in records))
            self._step_gradients.record_complete(layout.name, add_in_order(torch.cat(squares)), filled_params)
        all_terms: list[float] = []
        all_metrics: list[PartialMean] = []
        for count, metric_counts, record_values, _ in records:
            all_terms += record_values[:count].tolist()
            for (name, weight), mean_total in zip(metric_counts, record_values[count:].tolist(), strict=False):
                all_metrics.append(PartialMean(name, mean_total, weight))
        return lambda: (all_terms, all_metrics)

    def _turn_keys(self, op: Op) -> Iterator[deque[str]]:
        """Yield the keys of the parts to gather or exchange while a visit's op runs, one deque per group."""
        for group in op.passing:
            keys = zip(group, self._execution.content_keys(op, group), strict=True)
            turn_keys = deque(
                key for use, key in keys if self.weights.has(key) or (self.gradients.has(key) and use.mode != "r")
            )
            if turn_keys:
                yield turn_keys

    def _process_unused(self, key: str) -> None:
        with self.weights.part(key) if self.weights.has(key) else self.gradients.part_sums(key):
            pass


class RankWindow:
    """Memory counter and GPU stream for the collectives.

    Attributes:
        device: Device of the leased shards, known after the first gather.
        side_stream: GPU stream for collectives that run concurrently with the layers; None if there is no such stream.
        live_bytes: Current total bytes of full copies, sums and received data.
    """

    def __init__(self, program: StepProgram) -> None:
        self._gathers_ahead = program.sharding.gathers_ahead > 0
        self.device = torch.device("cpu")
        self.side_stream: Any = None
        self.live_bytes = self.peak_bytes = 0

    def start_step(self) -> None:
        """Reset the counter. Make both streams wait for each other, because a failed step may have left work queued."""
        self.live_bytes = 0
        if self.side_stream is not None:
            self.side_stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(self.side_stream)

    def find_device(self, device: torch.device) -> None:
        """Record the device of the leased shards."""
        self.device = device
        if device.type == "cuda" and self._gathers_ahead and self.side_stream is None:
            self.side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def count(self, nbytes: int) -> None:
        """Count allocated bytes. Pass a negative number for freed bytes."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def wait_for_model(self) -> None:
        """Make later collectives wait, on the device, for the work that the model has queued."""
        if self.side_stream is not None:
            self.side_stream.wait_stream(torch.cuda.current_stream())

    def wait_for_collectives(self) -> None:
        """Make the model's later work wait, on the device, for the queued collectives."""
        if self.side_stream is not None:
            torch.cuda.current_stream().wait_stream(self.side_stream)

    @contextmanager
    def use_side_stream(self) -> Iterator[None]:
        """Queue all work of the context on the collectives' stream, if there is one."""
        if self.side_stream is None:
            yield
            return
        with torch.cuda.stream(self.side_stream):
            yield

    @contextmanager
    def within_tick(self) -> Iterator[None]:
        """Queue the context's collectives between the work that the model has queued and its later work."""
        # All collectives use one stream, so the device runs them in tape order.
        self.wait_for_model()
        with self.use_side_stream():
            yield
        self.wait_for_collectives()

    def event(self) -> Any:
        """Record and return an event on the collectives' stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.side_stream)
        return event


class PartOrder:
    """Order in which a tick gathers weight parts and exchanges gradient parts, one part at a time.

    The order does not depend on data: a part has a turn even if a rank has no rows or no gradient for the part.

    Args:
        process_unused: Function that gathers or exchanges a part that the model did not request, given the part's key.
    """

    def __init__(self, process_unused: Callable[[str], None]) -> None:
        self._process_unused = process_unused
        self._groups: deque[deque[str]] = deque()  # remaining turns of the current tick

    def clear(self) -> None:
        """Drop the remaining parts of a failed step."""
        self._groups.clear()

    def begin(self, groups: Iterator[deque[str]]) -> None:
        """Start a new tick, whose parts have these keys."""
        self._groups.extend(groups)

    def advance_to(self, key: str, op: Op) -> None:
        """Advance to a part's turn. First gather or exchange all earlier parts, which the model did not request."""
        self.advance_to_group(key, op)
        group = self._groups[0]
        while (turn := group.popleft()) != key:
            self._process_unused(turn)
        if not group:
            self._groups.popleft()

    def advance_to_group(self, key: str, op: Op) -> None:
        """Gather or exchange all remaining parts that come before a part's group."""
        self._process_groups(key)
        assert self._groups, f"{key} has no turn in {op}"

    def finish_turns(self, op: Op) -> None:
        """Gather or exchange all remaining parts of an op's tick."""
        self._process_groups(None)

    def _process_groups(self, stop_key: str | None) -> None:
        while self._groups and stop_key not in self._groups[0]:
            for turn in self._groups.popleft():
                self._process_unused(turn)


@dataclass(slots=True)
class _OpCopies:
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


class FullCopies(WeightProvider):
    """``WeightProvider`` that provides full copies of weights, gathered from the shards of all ranks."""

    def __init__(
        self, collectives: Collectives, execution: TapeExecution, window: RankWindow, turns: PartOrder
    ) -> None:
        self._collectives, self._execution, self._window, self._turns = collectives, execution, window, turns
        self._graph, self._program = execution.model.graph, execution.model.program
        self._part_positions: dict[str, tuple[str, int]] = {}  # key -> layout, part
        for layout in self._graph.layouts.values():
            for part, key in enumerate(self._program.weight_keys(layout)):
                self._part_positions[key] = layout.name, part
        self._full_copies: dict[tuple[Phase, int], deque[_OpCopies]] = {}  # tick that needs them -> copies, in order

    def start_step(self) -> None:
        """Drop the copies of a failed step."""
        self._full_copies.clear()

    def has(self, key: str) -> bool:
        """Return whether a key belongs to a weight."""
        return key in self._part_positions

    def gather(self, op: Op) -> None:
        """Gather the full copies of weights that a later visit needs."""
        assert op.served_phase is not None, op
        program, keys = self._program, self._execution.content_keys(op, op.held)
        names = dict.fromkeys(self._part_positions[key][0] for key in keys)
        copies = _OpCopies()
        with self._window.use_side_stream():
            with self._execution.lease(keys) as shards:
                self._window.find_device(shards[keys[0]].device)
                for layout in (self._graph.layouts[name] for name in names):
                    layout_shards = [shards[key] for key in program.weight_keys(layout)]
                    dtype = program.gathered_dtype(program.weight_keys(layout)[0])
                    copy = torch.empty(program.full_elements(layout), dtype=dtype, device=self._window.device)
                    self._window.count(copy.nbytes)
                    copies.tensors[layout.name] = copy
                    copies.works.append(self._gather_parts(copy, program.weight_parts(layout), layout_shards))
            if self._window.side_stream is not None:
                copies.event = self._window.event()
        self._full_copies.setdefault((op.served_phase, op.visit), deque()).append(copies)

    def _gather_parts(self, copy: Tensor, parts: Sequence[range], shards: Sequence[Tensor]) -> Any:
        """Gather the parts of a layout. Return the last part's operation if it is asynchronous.

        Parts are gathered in order, because a part's padding can extend into the next part, which then overwrites it.
        Each shard is copied before the gather, so the shard's lease need not wait for other ranks. The copy also rounds
        averages to the compute dtype.
        """
        work: Any = None
        can_overlap = self._program.sharding.gathers_ahead > 0 and self._window.side_stream is None
        for index, (part, shard) in enumerate(zip(parts, shards, strict=True)):
            target = _slice(copy, self._program.sharding.shards.gathered_range(part))
            work = self._gather_part(target, shard, is_async=can_overlap and index == len(parts) - 1)
        return work

    def _gather_part(self, target: Tensor, shard: Tensor, *, is_async: bool = False) -> Any:
        """Gather a part into ``target``. Return the operation if it is asynchronous."""
        shards = self._program.sharding.shards
        own_shard = target.view(shards.size, -1)[shards.rank]
        own_shard.copy_(shard)
        return self._collectives.gather(target, own_shard, is_async=is_async)

    def drop(self, op: Op) -> None:
        """Drop the full copies of a finished visit."""
        pending = self._full_copies.get((op.phase, op.visit))
        if pending:
            copies = pending.popleft()
            self._window.wait_for_model()  # wait, because the next gather reuses the memory
            self._window.count(-sum(tensor.nbytes for tensor in copies.tensors.values()))

    @contextmanager
    def for_visit(self, layouts: Sequence[UnitLayout], visit: int) -> Iterator[Mapping[str, Tensor | MatrixParts]]:
        """Yield parameters as views of full copies, or as parts to gather one at a time; see ``WeightProvider``."""
        op = self._execution.current_op
        tensors: dict[str, Tensor | MatrixParts] = {}
        for layout in layouts:
            if self._program.is_passing_weight(visit, layout.name):
                keys = self._program.weight_keys(layout)
                tensors[layout.entries[0].name] = LeasedParts(layout, keys, {}, self._gather_in_turn)
            else:
                copies = self._full_copies[op.phase, op.visit][0]
                copies.wait()
                tensors.update(views(copies.tensors[layout.name][: layout.num_elements], layout))
        yield tensors

    def skip(self, layouts: Sequence[UnitLayout], visit: int) -> None:
        """Wait for the full copies without using them. Gathers are collective, and other ranks may need the weights."""
        with self.for_visit(layouts, visit):
            pass

    @contextmanager
    def _gather_in_turn(self, keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Gather a part of a weight when its turn comes."""
        (key,) = keys
        self._turns.advance_to(key, self._execution.current_op)
        with self.part(key) as copy:
            yield {key: copy}

    @contextmanager
    def part(self, key: str) -> Iterator[Tensor]:
        """Gather a part of a weight. Call this only when it is the part's turn."""
        name, index = self._part_positions[key]
        part = self._program.weight_parts(self._graph.layouts[name])[index]
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
    """``GradientMemory`` that sums gradients in separate memory, then exchanges the sums between ranks.

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
        self._part_positions: dict[str, tuple[str, int, int]] = {}  # key -> layout, use site, part
        for layout in self._graph.layouts.values():
            for use_site in range(len(gradients.uses[layout.name])):
                for part, key in enumerate(self._program.gradient_keys(layout, use_site)):
                    self._part_positions[key] = layout.name, use_site, part
        self._pending_exchanges: list[_ExchangedSums] = []  # sums that exchanges may still be sending
        self._sums: dict[tuple[str, int], list[Tensor]] = {}  # layout, use site -> one sum per range of lanes
        self._partials: dict[tuple[str, int], Tensor] = {}  # layout, part -> partial sums of squares

    def start_step(self) -> None:
        """Drop the sums of a failed step."""
        self._pending_exchanges.clear()
        self._sums.clear()
        self._partials.clear()

    def has(self, key: str) -> bool:
        """Return whether a key belongs to a gradient."""
        return key in self._part_positions

    def take_partials(self, layout: UnitLayout) -> list[Tensor]:
        """Remove and return partial sums of squares for this rank's shards of a gradient, by part."""
        return [self._partials.pop((layout.name, part)) for part in range(len(self._program.layout_parts(layout)))]

    def drop_sent_sums(self) -> None:
        """Drop the sums that earlier exchanges sent."""
        for exchange in self._pending_exchanges:
            torch.cuda.current_stream().wait_event(exchange.event)  # wait, because the next sums reuse the memory
            self._window.count(-sum(tensor.nbytes for tensor in exchange.sums))
        self._pending_exchanges.clear()

    @contextmanager
    def lease_sums(self, layouts: Sequence[UnitLayout], visit: int) -> Iterator[LaneAccumulator]:
        """Yield fp32 sums over this rank's micro-batches. A later op exchanges the sums; see ``GradientMemory``."""
        memories: list[dict[str, Tensor]] = []  # memory by layout, for each open sum of lanes

        def make_accumulator() -> GradientAccumulator:
            memory = {
                layout.name: torch.empty(
                    self._program.full_elements(layout), dtype=torch.float32, device=self._window.device
                )
                for layout in layouts
            }
            self._window.count(sum(each.nbytes for each in memory.values()))
            memories.append(memory)
            targets: dict[str, Tensor | SplitTensor] = {}
            for layout in layouts:
                # Use the same pieces as a single process, because matmuls of different shapes can round differently.
                parts = self._program.layout_parts(layout)
                targets.update(views_of_parts([_slice(memory[layout.name], part) for part in parts], parts, layout))
            return GradientAccumulator(targets, set())

        accumulator = LaneAccumulator(self._gradients.lanes, make_accumulator(), make_accumulator)
        yield accumulator
        filled_sets = [None if each is None else each.added_names for _, each in accumulator.close()]
        while len(memories) < len(filled_sets):  # add sums for lanes without a micro-batch
            make_accumulator()
        for memory in memories[len(filled_sets) :]:
            self._window.count(-sum(each.nbytes for each in memory.values()))
        for layout in layouts:
            use_site = self._gradients.use_site(layout.name, visit)
            self._sums[layout.name, use_site] = [memory[layout.name] for memory in memories[: len(filled_sets)]]
            names = {entry.name for entry in layout.entries}
            for sums, filled_set in zip(self._sums[layout.name, use_site], filled_sets, strict=True):
                filled_params = names & (filled_set or frozenset())
                self._gradients.record_filled(layout.name, visit, filled_params)
                zero_gaps([sums[: layout.num_elements]], (range(layout.num_elements),), layout, filled_params)

    def exchange(self, op: Op) -> None:
        """Exchange gradient sums. Each rank adds up and stores the sums for the shards that it owns."""
        self._window.wait_for_model()  # wait until the model has computed the sums
        sent_sums: list[Tensor] = []
        with self._window.use_side_stream():
            for group in op.passing:
                keys = self._execution.content_keys(op, group)
                name, site, part = self._part_positions[keys[0]]
                parts = self._program.layout_parts(self._graph.layouts[name])
                elements = self._program.sharding.shards.gathered_range(parts[part])
                with self._execution.lease(keys) as tensors:
                    self._exchange_part(keys, tensors, [_slice(memory, elements) for memory in self._sums[name, site]])
                if part == len(parts) - 1:
                    sent_sums += self._sums.pop((name, site))
                    if self._window.side_stream is None:
                        self._window.count(-sum(memory.nbytes for memory in sent_sums))
                        sent_sums.clear()
            if self._window.side_stream is not None:
                self._pending_exchanges.append(_ExchangedSums(sent_sums, self._window.event()))

    def _exchange_part(self, keys: Sequence[str], tensors: Mapping[str, Tensor], sums: Sequence[Tensor]) -> None:
        """Sum a part's gradient at one use site over all ranks, and store this rank's shard.

        Args:
            keys: Key of the gradient, followed by the keys of other use sites' gradients to add.
            sums: One sum per range of this rank's lanes. Each contains the concatenated shards of all ranks.
        """
        name, use_site, part = self._part_positions[keys[0]]
        elements = self._program.layout_parts(self._graph.layouts[name])[part]
        block, *other_gradients = (tensors[key] for key in keys)
        num_owned = len(self._program.sharding.shards.owned_range(elements))
        block.copy_(self._exchange_sums(sums))
        # Zero the padding, because the sums contain elements of the next part there.
        block[num_owned:].zero_()
        if use_site > 0:
            return
        # The backward reaches the first use site last, so the sums of all sites are now complete.
        self._gradients.add_uses(block, other_gradients)
        self._partials[name, part] = partial_squares(block[:num_owned], self._gradients.threads)

    def _exchange_sums(self, sums: Sequence[Tensor]) -> Tensor:
        """Exchange sums, and return the sum over all lanes for this rank's shard of a part.

        Args:
            sums: One sum [ranks * N] per range of this rank's lanes, containing the concatenated shards of all ranks.
        """
        lanes = self._program.sharding.lanes
        rank_nodes = [lanes.rank_sums(rank) for rank in range(lanes.size)]
        length = sums[0].numel() // lanes.size
        received = torch.empty(lanes.num_sums * length, dtype=torch.float32, device=sums[0].device)
        self._window.count(received.nbytes)
        node_sums: dict[Subtree, Tensor] = {}
        start = 0
        for index in range(max(map(len, rank_nodes))):
            receive_lengths = [length * (index < len(nodes)) for nodes in rank_nodes]
            stop = start + sum(receive_lengths)
            outgoing = sums[index] if index < len(sums) else received[:0]
            send_lengths = [length * (index < len(sums))] * lanes.size
            self._collectives.exchange(received[start:stop], outgoing, receive_lengths, send_lengths)
            rows = iter(received[start:stop].view(-1, length))
            node_sums.update((nodes[index], next(rows)) for nodes in rank_nodes if index < len(nodes))
            start = stop
        self._window.count(-received.nbytes)
        return total(0, lanes.count, node_sums, Tensor.add_)

    @contextmanager
    def part(self, layout: UnitLayout, visit: int, index: int, key: str) -> Iterator[list[Tensor]]:
        """Yield memory for a gradient part's sums. On exit, exchange them in their turn; see ``GradientMemory``."""
        op = self._execution.current_op
        self._turns.advance_to_group(key, op)
        with self.part_sums(key, wait_for_turn=lambda: self._turns.advance_to(key, op)) as sums:
            yield sums

    @contextmanager
    def part_sums(self, key: str, wait_for_turn: Callable[[], None] = lambda: None) -> Iterator[list[Tensor]]:
        """Yield zeroed memory for the sums of one part of a gradient. Exchange the sums on exit.

        Args:
            wait_for_turn: Function called after the sums are complete and before the exchange.
        """
        name, use_site, index = self._part_positions[key]
        layout = self._graph.layouts[name]
        part = self._program.layout_parts(layout)[index]
        shape = len(self._gradients.lanes.subtrees), len(self._program.sharding.shards.gathered_range(part))
        memory = torch.zeros(shape, dtype=torch.float32, device=self._window.device)
        self._window.count(memory.nbytes)
        yield [row[: len(part)] for row in memory]
        wait_for_turn()
        other_sites = range(1, len(self._gradients.uses[name])) if use_site == 0 else ()
        keys = [key, *(self._program.gradient_keys(layout, site)[index] for site in other_sites)]
        with self._window.within_tick(), self._execution.lease(keys) as tensors:
            self._exchange_part(keys, tensors, list(memory))
        self._window.count(-memory.nbytes)

    @contextmanager
    def open_sums(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a function that allocates open sums. Their memory is counted until exit; see ``GradientMemory``."""
        allocated_bytes = 0

        def allocate(tensor: Tensor) -> Tensor:
            nonlocal allocated_bytes
            memory = torch.empty_like(tensor)
            allocated_bytes += memory.nbytes
            self._window.count(memory.nbytes)
            return memory

        yield allocate
        self._window.count(-allocated_bytes)


def _concatenate_on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors in double precision on the host. Tensors on a device need one copy and one host sync."""
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    values = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
    if not values.is_cuda:
        return values
    host_values, event = copy_to_host(values)
    event.synchronize()
    return host_values


def _slice(tensor: Tensor, elements: range) -> Tensor:
    return tensor[elements.start : elements.stop]


def program_properties(program: StepProgram, num_micro_batches: int) -> dict[str, str]:
    """Return the properties on which all ranks must agree, by name. They determine the order of collectives.

    Homes of blocks can differ between ranks, because they do not affect this order.
    """
    lanes, updates = program.sharding.lanes, program.updates
    parts = {
        "sum of gradients": f"{lanes.count} lanes of {num_micro_batches} micro-batches, {lanes.num_hosts} hosts",
        "kept graphs": str(sorted(program.recompute.kept_graphs)),
        "updates": "after the norm of a whole step" if updates.are_deferred else "in the backward",
    }
    for index, tick in enumerate(program.ticks):
        # Skip deferred updates: they issue no collectives, and their position depends on the memory of each rank.
        if tick.phase != "update" or not updates.are_deferred:
            blocks = [program.contents(index, key) for key, _ in tick.uses]
            sizes = [f"{b.key} [{b.num_elements}] {b.dtype}" for b in blocks if b.kind != "activations"]
            parts[f"op {len(parts)}"] = " ".join([f"{tick.phase} {tick.visit}", tick.served_phase or "", *sizes])
    return parts
