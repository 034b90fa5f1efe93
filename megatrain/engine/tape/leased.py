"""Sharding hooks of the executor, and their single-process implementation, whose weights are views of leased blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatrain.base.layout import Piece, SplitTensor, UnitLayout, pieces_of_parts, views, views_of_pieces
from megatrain.engine.device.host_io import PendingScalars
from megatrain.engine.head.loss import PartialMean
from megatrain.engine.program.visit_trace import unit_layouts
from megatrain.engine.program.workspace import decoded_bytes
from megatrain.engine.tape.pieces import DecodedWeights, LeasedParts, empty_sum, fp32_sum, zero_gaps
from megatrain.engine.unit.weight_gradients import GradientAccumulator, LaneAccumulator

if TYPE_CHECKING:
    from megatrain.engine.program.block_access import MatrixParts
    from megatrain.engine.tape.execution import TapeExecution
    from megatrain.engine.tape.gradients import StepGradients
    from megatrain.engine.tape.pieces import GradientMemory
    from megatrain.engine.tape.tape import Op


#: Loss terms and metrics of all ranks on the host, in the order of the micro-batches.
HostResults = tuple[list[float], list[PartialMean]]


class WeightProvider:
    """Interface that converts leased blocks to the weights that a visit uses."""

    def for_visit(
        self, layouts: Sequence[UnitLayout], visit: int
    ) -> AbstractContextManager[Mapping[str, torch.Tensor | MatrixParts]]:
        """Lease layouts for the duration of a visit, and yield their parameters by full name."""
        raise NotImplementedError

    def skip(self, layouts: Sequence[UnitLayout], visit: int) -> None:
        """Skip a visit's weights. Called instead of ``for_visit`` if no token is routed to the unit."""
        raise NotImplementedError

    def announce_idle(self, visits: Sequence[int], idle_visits: Collection[int]) -> None:
        """Announce which visits, starting with the current visit, will skip their weights. Optional to implement."""

    def skip_unlikely(self, num_tokens: int) -> None:
        """Cancel prefetches for experts that will probably get no token in a step of ``num_tokens`` tokens."""


class ShardingHooks:
    """Hooks that the executor calls for all behavior that depends on the number of ranks.

    Attributes:
        weights: Converter of leased blocks to weights.
        gradients: Provider of memory for gradient sums.
    """

    weights: WeightProvider
    gradients: GradientMemory

    @property
    def window_bytes(self) -> int:
        """Peak total bytes of full copies of weights, gradient sums and received data."""
        return 0

    def start_step(self) -> None:
        """Drop the state of a previous step that may have failed."""

    def before_visit(self, op: Op) -> None:
        """Prepare a visit. Called after the visit's op has begun."""

    def after_visit(self) -> None:
        """Drop the tensors of the current op's visit. Called before the next op begins."""

    def end_visits(self) -> None:
        """Free memory of visits. Called after the last visit, before the remaining exchanges and updates."""

    def end_step(self) -> None:
        """Drop all remaining tensors. Called after the last op."""

    def run(self, op: Op) -> None:
        """Run a gather op or an exchange op."""
        raise AssertionError(f"a single process has no {op}")

    def before_update(self, layout: UnitLayout) -> None:
        """Combine a layout's gradient norm over all ranks. Called before an update that is not deferred."""

    def collect_results(
        self, layouts: Sequence[UnitLayout], terms: Sequence[torch.Tensor], metrics: Sequence[PartialMean]
    ) -> Callable[[], HostResults]:
        """Queue the transfer of a step's results to the host, for all ranks.

        Args:
            layouts: Layouts with complete gradients. The returned function converts their norms to floats.
            terms: Scalars whose sum is the loss of this process.
            metrics: Contributions of this process to the metrics of the loss.

        Returns:
            A function that waits for the results and returns them. Call it once.
        """
        raise NotImplementedError


class OneProcess(ShardingHooks):
    """Hooks of a single process, which needs no communication."""

    def __init__(self, execution: TapeExecution, gradients: StepGradients) -> None:
        self._step_gradients = gradients
        self.weights: LeasedWeights = LeasedWeights(execution)
        self.gradients = LeasedGradients(execution, gradients)

    def end_visits(self) -> None:
        """Free the memory of decoded weights, so that updates can use it."""
        self.weights.free()

    def collect_results(
        self, layouts: Sequence[UnitLayout], terms: Sequence[torch.Tensor], metrics: Sequence[PartialMean]
    ) -> Callable[[], HostResults]:
        """Queue the transfer of a step's results to the host, which needs one host sync; see ``ShardingHooks``."""
        squared_norms = self._step_gradients.squared_norms
        norms = [squared_norms[layout.name] for layout in layouts]
        scalars = PendingScalars([*terms, *(metric.total for metric in metrics), *norms])

        def read_results() -> HostResults:
            values = iter(scalars.read())
            loss_terms = [next(values) for _ in terms]
            means = [replace(metric, total=next(values)) for metric in metrics]
            squared_norms.update(zip([layout.name for layout in layouts], values, strict=True))
            return loss_terms, means

        return read_results


class LeasedWeights(WeightProvider):
    """``WeightProvider`` that provides weights as views of leased blocks, or decodes them from leased blocks."""

    def __init__(self, execution: TapeExecution) -> None:
        self._execution = execution
        model = execution.model
        self._graph, self._program = model.graph, model.program
        self._visit_units = [visit_trace.unit for visit_trace in model.trace.visits]
        self._visit_ticks: dict[tuple[str, int], list[int]] = {}
        for index, tick in enumerate(self._program.ticks):
            self._visit_ticks.setdefault((tick.phase, tick.visit), []).append(index)
        visits = enumerate(model.trace.visits)
        probabilities = ((index, visit.no_token_probability) for index, visit in visits)
        self._idle_probabilities = {index: probability for index, probability in probabilities if probability}
        self._decode_buffer = DecodedWeights(decoded_bytes(model.graph, model.trace, model.program))

    def free(self) -> None:
        """Free the memory of decoded weights until the next visit."""
        self._decode_buffer.free()

    @contextmanager
    def for_visit(
        self, layouts: Sequence[UnitLayout], visit: int
    ) -> Iterator[Mapping[str, torch.Tensor | MatrixParts]]:
        """Yield parameters as views of leased blocks, or decode them from leased blocks; see ``WeightProvider``."""
        program, lease = self._program, self._execution.lease
        part_names = {layout.name for layout in layouts if program.is_passing_weight(visit, layout.name)}
        held_keys = [key for layout in layouts if layout.name not in part_names for key in program.weight_keys(layout)]
        # Exit the decode contexts before the leases end, and in reverse order, because the decode memory is a stack.
        with lease(held_keys) as blocks, ExitStack() as stack:
            tensors: dict[str, torch.Tensor | MatrixParts] = {}
            for layout in layouts:
                if program.decoded_bytes(visit, layout):
                    tensors.update(stack.enter_context(self._lease_decoded(layout, visit, blocks)))
                elif layout.name in program.cuts.weights:
                    keys = program.weight_keys(layout)
                    tensors[layout.entries[0].name] = LeasedParts(layout, keys, blocks, lease)
                else:
                    (key,) = program.weight_keys(layout)
                    tensors.update(views(blocks[key], layout))
            yield tensors

    @contextmanager
    def _lease_decoded(
        self, layout: UnitLayout, visit: int, blocks: Mapping[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor | MatrixParts]]:
        """Yield the parameters of a layout whose blocks are encoded.

        Args:
            blocks: Leased blocks by key. They include either all blocks of the layout or none of them.
        """
        program, keys = self._program, self._program.weight_keys(layout)
        name, is_cut = layout.entries[0].name, layout.name in program.cuts.weights

        @contextmanager
        def lease(part_keys: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
            (key,) = part_keys
            with self._execution.lease(part_keys) as part_blocks, self._decode(layout, visit, part_blocks) as part:
                yield {key: part}

        if keys[0] not in blocks:
            yield {name: LeasedParts(layout, keys, {}, lease)}
            return
        with self._decode(layout, visit, {key: blocks[key] for key in keys}) as weights:
            if is_cut:
                parts = [weights[part.start : part.stop] for part in program.layout_parts(layout)]
                yield {name: LeasedParts(layout, keys, dict(zip(keys, parts, strict=True)), lease)}
            else:
                yield dict(views(weights, layout))

    @contextmanager
    def _decode(self, layout: UnitLayout, visit: int, blocks: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Decode leased blocks of a layout, and yield the weights concatenated in one flat tensor."""
        program, encoding = self._program, self._program.encodings[layout.name]
        lengths = dict(zip(program.weight_keys(layout), map(len, program.weight_parts(layout)), strict=True))
        device, stop = next(iter(blocks.values())).device, 0
        with self._decode_buffer.reserve(program.decoded_bytes(visit, layout), device) as buffer:
            weights = buffer.view(encoding.dtype)
            for key, block in blocks.items():
                start, stop = stop, stop + lengths[key]
                encoding.decode(block, weights[start:stop])
            yield weights[:stop]

    def skip(self, layouts: Sequence[UnitLayout], visit: int) -> None:
        """Skip a visit's weights; see ``WeightProvider``."""
        self._execution.skip(key for layout in layouts for key in self._program.weight_keys(layout))

    def announce_idle(self, visits: Sequence[int], idle_visits: Collection[int]) -> None:
        """Cancel the prefetch of weights that only idle visits need."""
        current_tick = self._execution.current_op.tick
        idle_uses: list[tuple[int, str]] = []
        needed_uses: list[tuple[int, str]] = []
        for visit in visits:
            for phase in ("forward", "backward"):
                ticks = self._visit_ticks.get((phase, visit), ())
                # Take the visit's next tick, because a step can run a visit once per micro-batch.
                tick = next((tick for tick in ticks if tick >= current_tick), None)
                if tick is not None:
                    uses = idle_uses if visit in idle_visits else needed_uses
                    uses += [(tick, key) for key in self._visit_keys(visit)]
        self._execution.skip_prefetch(idle_uses, resumed_uses=needed_uses)

    def skip_unlikely(self, num_tokens: int) -> None:
        """Cancel the prefetch, in this step and the next, of weights whose experts will probably get no token."""
        if not self._idle_probabilities:
            return
        visits = [visit for visit, probability in self._idle_probabilities.items() if probability**num_tokens > 1 / 2]
        for first_tick in (0, len(self._program.ticks)):  # the prefetcher can already fetch for the next step
            self._execution.skip_prefetch(
                [
                    (first_tick + tick, key)
                    for visit in visits
                    for key in self._visit_keys(visit)
                    for tick in self._visit_ticks.get(("forward", visit), ())
                ]
            )

    def _visit_keys(self, visit: int) -> list[str]:
        """Return the keys of a visit's weights."""
        layouts = [self._graph.layouts[name] for name in unit_layouts(self._graph, self._visit_units[visit])]
        return [key for layout in layouts for key in self._program.weight_keys(layout)]


class LeasedGradients:
    """``GradientMemory`` that sums gradients in their blocks, or in fp32 copies if the blocks are not fp32."""

    def __init__(self, execution: TapeExecution, gradients: StepGradients) -> None:
        self._execution, self._gradients = execution, gradients
        self._graph, self._program = execution.model.graph, execution.model.program
        self._pieces: dict[str, Sequence[Sequence[Piece]]] = {}  # layout -> pieces of its parts

    @contextmanager
    def lease_sums(self, layouts: Sequence[UnitLayout], visit: int) -> Iterator[LaneAccumulator]:
        """Lease gradient blocks, and yield the accumulators; see ``GradientMemory``."""
        names = [layout.name for layout in layouts]
        all_keys = {
            layout.name: self._program.gradient_keys(layout, self._gradients.use_site(layout.name, visit))
            for layout in layouts
        }
        with self._execution.lease([key for name in names for key in all_keys[name]]) as tensors:
            sums = {name: [fp32_sum(tensors[k], self._execution.use(k).mode) for k in all_keys[name]] for name in names}
            filled_params = set[str]().union(*(self._gradients.site_params(name, visit) for name in names))
            first_sum = GradientAccumulator(self._targets(sums), filled_params)

            def make_accumulator() -> GradientAccumulator:
                return GradientAccumulator(
                    self._targets({name: [empty_sum(tensors[key]) for key in all_keys[name]] for name in names}), set()
                )

            accumulator = LaneAccumulator(self._gradients.lanes, first_sum, make_accumulator)
            yield accumulator
            accumulator.close()
            del accumulator, first_sum  # frees the memory of sums outside of blocks
            # Close within the leases, because closing writes the blocks and the norm reads them.
            for layout in layouts:
                keys = all_keys[layout.name]
                self._close(layout, visit, sums.pop(layout.name), [tensors[key] for key in keys], keys, filled_params)

    def _targets(self, sums: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor | SplitTensor]:
        """Return views of gradient memory by parameter, given the memory by layout and part."""
        targets: dict[str, torch.Tensor | SplitTensor] = {}
        for name, parts in sums.items():
            layout = self._graph.layouts[name]
            if name not in self._pieces:  # cached, because it is the same in every step
                self._pieces[name] = pieces_of_parts(self._program.layout_parts(layout), layout)
            targets.update(views_of_pieces(parts, self._pieces[name], layout))
        return targets

    def _close(
        self,
        layout: UnitLayout,
        visit: int,
        sums: list[torch.Tensor],
        blocks: Sequence[torch.Tensor],
        keys: Sequence[str],
        filled_params: set[str],
    ) -> None:
        """Store a use site's sums in their blocks. The last use site to run adds up the sums of all sites."""
        name = layout.name
        entry_names = [entry.name for entry in layout.entries]
        self._gradients.record_filled(name, visit, filled_params.intersection(entry_names))
        if self._execution.use(keys[0]).mode == "w":  # blocks leased for writing have undefined contents
            zero_gaps(sums, self._program.layout_parts(layout), layout, self._gradients.site_params(name, visit))
        for gradient_sum, block in zip(sums, blocks, strict=True):
            if gradient_sum is not block:
                block.copy_(gradient_sum)
        sums.clear()
        # The backward reaches the first use site last, so the sums of all sites are now complete.
        if visit == self._gradients.uses[name][0]:
            self._sum_uses(layout, blocks)

    def _sum_uses(self, layout: UnitLayout, blocks: Sequence[torch.Tensor]) -> None:
        """Add the other use sites' gradients in forward order, and record the norm of the total."""
        name = layout.name
        uses = self._gradients.uses[name]
        other_keys = [self._program.gradient_keys(layout, use_site) for use_site in range(1, len(uses))]
        if other_keys and not self._execution.has_use(other_keys[0][0]):
            return  # later micro-batches, which run separately, still add to the sums
        if not other_keys:
            self._gradients.add_all_to_norm(name, blocks)
        for part, block in enumerate(blocks if other_keys else ()):
            with self._execution.lease([keys[part] for keys in other_keys]) as tensors:
                self._sum_part(name, part, block, [tensors[keys[part]] for keys in other_keys])
        self._gradients.complete(name, uses[0])

    def _sum_part(self, name: str, part: int, block: torch.Tensor, other_gradients: Sequence[torch.Tensor]) -> None:
        """Add one part of the other use sites' gradients to the first site's part, and add the total to the norm."""
        self._gradients.add_uses(block, other_gradients)
        self._gradients.add_to_norm(name, part, block)

    @contextmanager
    def part(self, layout: UnitLayout, visit: int, part_index: int, key: str) -> Iterator[list[torch.Tensor]]:
        """Yield the leased block, or an fp32 sum that is copied to the block; see ``GradientMemory``."""
        uses, mode = self._gradients.uses[layout.name], self._execution.use(key).mode
        other_keys = [self._program.gradient_keys(layout, use_site)[part_index] for use_site in range(1, len(uses))]
        is_summed = visit == uses[0] and all(map(self._execution.has_use, other_keys))
        with self._execution.lease([key, *(other_keys if is_summed else ())]) as tensors:
            total = fp32_sum(tensors[key], mode)
            if mode == "w":  # a block leased for writing has undefined contents
                total.zero_()
            yield [total]
            if total is not tensors[key]:
                tensors[key].copy_(total)
                del total
            if is_summed:
                self._sum_part(layout.name, part_index, tensors[key], [tensors[k] for k in other_keys])

    @contextmanager
    def open_sums(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield a function that allocates partial sums. The plan counts their memory; see ``GradientMemory``."""
        yield torch.empty_like
