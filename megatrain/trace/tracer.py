"""Implementation of `BlockAccess` for traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.absent_weights import METADATA_QUERIES
from megatrain.engine.arguments import tree_map
from megatrain.engine.forward import LayerRunner, PassOrder
from megatrain.engine.objective import Objective
from megatrain.engine.program import TracedVisit, VisitMemory, VisitTrace
from megatrain.engine.saved_results import NOT_SAVABLE, ResultSizes, Savable
from megatrain.engine.unneeded import NOTHING_UNNEEDED, ProductUses, Unneeded
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.engine.work import NO_WORK, Work
from megatrain.trace.counting import CountingError, CountingMode, count_flops, tensors_in
from megatrain.trace.repeated_layers import CountedBackward, RepeatedLayers, gradients_of
from tiered.units import round_up

if TYPE_CHECKING:
    from megatrain.engine.bound_unit import BoundUnit
    from megatrain.engine.visit import UnitVisit
    from megatrain.models.converter import LayerPart
    from megatrain.models.graph import ModelGraph, Unit

_ANY_NBYTES = 1 << 50  # a fake tensor needs no memory
_ALIGNMENT_BYTES = 512  # allocators round sizes up to a multiple


@dataclass(slots=True)
class _Phase:
    """Counts of one tick."""

    name: str
    visit: int
    held_nbytes: int
    peak_nbytes: int
    first_storage: int
    work: Work = NO_WORK


class Tracer:
    """`BlockAccess` for an engine on fake tensors. Provides fake weights, and reads counters at every tick."""

    def __init__(
        self,
        graph: ModelGraph,
        dtype: torch.dtype,
        device: torch.device,
        *,
        head_rows: int | None = None,
        head_columns: int | None = None,
        objective: Objective | None = None,
        is_compiled: bool = False,
    ) -> None:
        self.counts = CountingMode()
        self._dense_masks: dict[str, None] = {}  # ordered set of the reasons for dense masks
        self._shapes = {entry.name: entry.shape for layout in graph.layouts.values() for entry in layout.entries}
        self._graph, self._dtype, self._device, self._is_compiled = graph, dtype, device, is_compiled
        self._phases: list[_Phase] = []
        self._saved: dict[int, list[Tensor]] = {}
        self._counted: dict[Any, int] = {}  # kind of part -> visit that runs for it
        self._counted_visits: dict[int, int] = {}  # visit of a part -> visit whose counts it shares
        self._chances_of_no_token: dict[int, float] = {}  # visit of a part -> probability that a token skips it
        self._reused: dict[int, dict[int, tuple[int, int]]] = {}
        self._units: list[int] = []
        self._with_backward: set[int] = set()
        self._graph_nbytes: dict[int, int] = {}
        self._savable: dict[int, tuple[Savable, Savable]] = {}  # visit -> results of attention, all results
        self._unneeded: dict[int, Unneeded] = {}
        self._filled: dict[int, set[str]] = {}
        self._only_rows: dict[int, set[str]] = {}  # visit -> parameters that get only row gradients
        self._looked_up: dict[int, set[str]] = {}  # visit -> parameters used only for look-ups
        self._stays: dict[int, int] = {}  # visit -> bytes that stay in use until its backward
        self._repeated = RepeatedLayers(self.counts)
        self.runner = LayerRunner(
            graph,
            self,
            device=device,
            order=PassOrder(head_rows=head_rows, head_columns=head_columns),
            objective=objective,
            context=partial(graph.computing, self._dense_masks.setdefault, is_compiled=is_compiled),
        )
        for bound in self.runner.bounds:
            if bound.unit.part is not None:
                bound.forward = self._running_once_per_kind(bound.unit.part, bound.forward)
            bound.forward = self._measured(bound, self._with_fallback(bound))
        self.runner.visits.run_backward = self._backward

    def skip_weights(self, unit: Unit, visit: int) -> None:
        raise AssertionError("a trace does not know the routing of tokens")

    def announce_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        raise AssertionError("a trace does not know the routing of tokens")

    def begin(self, phase: Literal["forward", "head", "backward"], visit: int) -> None:
        self.close()
        if phase != "forward" and not any(earlier.name != "forward" for earlier in self._phases):
            self._record_visits()  # the backward has not yet freed memory of visits
        self.counts.peak_nbytes, self.counts.work = self.counts.live_nbytes, NO_WORK
        self.counts.new_nbytes.clear()
        self._phases.append(_Phase(phase, visit, self.counts.live_nbytes, 0, self.counts.num_storages))

    def close(self) -> None:
        """Record peak memory and work of the current tick."""
        if self._phases:
            self._phases[-1].peak_nbytes = self.counts.peak_nbytes - self._phases[-1].held_nbytes
            self._phases[-1].work = self.counts.work

    def _record_visits(self) -> None:
        self._units = [visit.bound.unit.index for visit in self.runner.visits] + list(self.runner.head_units)
        # Storages that are created before a visit and live until the end of the forward cannot be hidden states.
        for phase in self._phases:
            if phase.name == "forward":
                self._stays[phase.visit] = self.counts.nbytes_made_before(phase.first_storage)

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, Tensor]]:
        if self._phases[-1].name != "forward":
            self._with_backward.add(visit)
        with self.counts.paused():
            tensors = {
                owner: torch.empty(self._shapes[owner], dtype=self._dtype, device=self._device)
                for _, owner, _ in unit.params
            }
        yield tensors

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientAccumulator]:
        names = {owner for _, owner, _ in unit.params}
        with self.counts.paused():  # gradients are in blocks, or are counted by the planner
            targets = {name: torch.empty(self._shapes[name], device=self._device) for name in names}
        accumulator = _TracedAccumulator(targets, self._filled.setdefault(visit, set()))
        yield accumulator
        self._only_rows[visit] = accumulator.with_rows - accumulator.with_others

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        with self.counts.paused():
            self._saved.setdefault(visit, []).append(tensor.clone())
        assert index == len(self._saved[visit]) - 1, (visit, index)

    def reuse_activation(self, visit: int, micro_batch: int, index: int, place: tuple[int, int]) -> None:
        self._saved.setdefault(visit, []).append(self._saved[place[0]][place[1]])
        self._reused.setdefault(visit, {})[index] = place

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[Tensor]:
        yield self._saved[visit][index]

    def results_block(self, visit: int, micro_batch: int) -> NoReturn:
        raise AssertionError("a trace measures results but does not save them")

    def _with_fallback(self, bound: BoundUnit) -> Callable[..., Any]:
        """Wrap a unit's forward. If a layer fails on guessed values, the wrapper returns the layer's input.

        In this case, the gradients of the layer's parameters are counted, but not its operators.
        """
        forward = bound.forward

        def guess(*args: Any, **kwargs: Any) -> Any:
            work = self.counts.work
            with self.counts.within_unit(bound.unit.name), self._recording_look_ups(bound):
                try:
                    return forward(*args, **kwargs)
                except (UnsupportedModelError, CountingError):
                    raise
                except Exception as error:
                    self.counts.work = work  # discard the work of an incomplete run
                    stream = args[0] if args else kwargs.get("hidden_states")
                    if not bound.unit.is_layer or not isinstance(stream, Tensor):
                        raise
                    self.counts.guess(
                        f"its forward failed on tensors without values ({type(error).__name__}: "
                        f"{str(error).partition(chr(10))[0]}); the plan assumes that it returns its input, without "
                        "other work or memory"
                    )
                    return stream + sum(parameter.sum() * 0 for parameter in bound.unit.module.parameters())

        return guess

    @contextmanager
    def _recording_look_ups(self, bound: BoundUnit) -> Iterator[None]:
        """Record which weights of a unit a run uses only once, to look up rows with `F.embedding`."""
        uses = _Uses({id(leaf): owner for owner, leaf in bound.leaves()})
        with nullcontext() if bound.unit.is_layer or bound.unit.part is not None else uses:
            yield
        found = {owner for owner, count in uses.num_look_ups.items() if count == 1} - uses.others
        visit = self._phases[-1].visit
        self._looked_up[visit] = self._looked_up.get(visit, found) & found

    def _running_once_per_kind(self, part: LayerPart, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a part so that only the first of several equal parts runs and is counted.

        This saves time, because a large model has a thousand visits to parts.
        """

        def once(*args: Tensor) -> Tensor:
            visit, kind = self._phases[-1].visit, (part.kind, *(tuple(tensor.shape) for tensor in args))
            self._counted_visits[visit] = self._counted.setdefault(kind, visit)
            self._chances_of_no_token[visit] = part.chance_of_no_token(args)
            if self._counted_visits[visit] == visit:
                return cast("Tensor", forward(*args))
            return part.placeholder_result(args)  # the counts of the part that runs include weight gradients

        return once

    def _measured(self, bound: BoundUnit, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a unit's forward so that it measures the graph and finds unneeded matmuls in a recompute."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if not self._phases or self._phases[-1].name != "backward":
                if not torch.is_grad_enabled():  # no backward follows
                    return forward(*args, **kwargs)
                return self._repeated.forward(bound, self._phases[-1].visit, forward, *args, **kwargs)
            visit, num_guesses = self._phases[-1].visit, self.counts.num_guesses
            is_compiled = self._is_compiled and bound.unit.is_layer
            matrices = {} if is_compiled else bound.matrices()
            uses = ProductUses(matrices, count_flops)
            saved: set[int | None] = set()

            def pack(tensor: Tensor) -> Tensor:
                saved.add(self.counts.number_of(tensor))
                uses.record_saved(tensor)
                return tensor

            sizes = ResultSizes(matrices, count_flops)
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            self.counts.on_launch = uses.record_launch
            try:
                with hooks, uses.following(), sizes.measuring():
                    value = forward(*args, **kwargs)
            finally:
                self.counts.on_launch = None
            self._record_graph(value, saved)
            # Skip units with guesses, because a real run can take a different path. Also skip parts, because their
            # number of tokens is unknown.
            if self.counts.num_guesses == num_guesses and bound.unit.part is None:
                self._unneeded[visit] = uses.unneeded(tensors_in(value))
            unneeded = self._unneeded.get(visit, NOTHING_UNNEEDED)
            self._savable[visit] = (sizes.attention, sizes.results(unneeded.weights))
            return value

        return measured

    def _backward(self, visit: UnitVisit, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run a visit's backward, or copy the counts of an equal backward that has already run."""
        key = self._repeated.key(visit.number, gradients)
        if key is not None and (earlier := self._repeated.earlier(key)) is not None:
            return visit.replace_backward(partial(self._copy_counts, earlier, visit))
        num_guesses = self.counts.num_guesses
        found = visit.backward(gradients)
        phase = self._phases[-1]
        assert (phase.name, phase.visit) == ("backward", visit.number)
        returned = gradients_of(found, phase.first_storage, self.counts)
        if key is not None and returned is not None and self.counts.num_guesses == num_guesses:
            peak_nbytes = self.counts.peak_nbytes - phase.held_nbytes
            owners = tuple(owner for _, owner, _ in visit.bound.unit.params)
            self._repeated.keep(key, CountedBackward(visit.number, owners, self.counts.work, peak_nbytes, returned))
        return found

    def _copy_counts(self, earlier: CountedBackward, visit: UnitVisit) -> list[Tensor | None]:
        number, counts = visit.number, self.counts
        counts.work += earlier.work
        counts.peak_nbytes = max(counts.peak_nbytes, counts.live_nbytes + earlier.peak_nbytes)
        self._with_backward.add(number)
        measured: tuple[dict[int, Any], ...] = (self._graph_nbytes, self._savable, self._only_rows)
        for of_visits in measured:
            if earlier.visit in of_visits:
                of_visits[number] = of_visits[earlier.visit]
        if (unneeded := self._unneeded.get(earlier.visit)) is not None:
            owners = dict(zip(earlier.owners, (owner for _, owner, _ in visit.bound.unit.params), strict=True))
            weights = frozenset(owners[owner] for owner in unneeded.weights)
            self._unneeded[number] = replace(unneeded, weights=weights)
        return [None if gradient is None else gradient.allocate() for gradient in earlier.gradients]

    def _record_graph(self, value: Any, saved: Collection[int | None]) -> None:
        """Record the size of a recompute's graph: the size of all live storages created in the visit's backward.

        Args:
            value: Result of the unit. Its tensors are not part of the graph if autograd has not saved them.
            saved: Numbers of the storages that autograd has saved. Addresses are reused, so they cannot identify them.
        """
        alive = dict(self.counts.new_nbytes)

        def forget(leaf: Any) -> None:
            if isinstance(leaf, Tensor) and self.counts.number_of(leaf) not in saved:
                alive.pop(leaf.untyped_storage()._cdata, None)

        tree_map(value, forget)
        visit = self._phases[-1].visit
        inputs = sum(tensor.untyped_storage().nbytes() for tensor in self._saved.get(visit, ()))
        self._graph_nbytes[visit] = inputs + sum(round_up(nbytes, _ALIGNMENT_BYTES) for nbytes in alive.values())

    def trace(self) -> VisitTrace:
        """Return the trace."""
        if not self._units:  # the trace has only a forward
            self._record_visits()
        phases = {(phase.name, phase.visit): phase for phase in self._phases}
        num_head = len(self.runner.head_units)
        first_head = len(self._units) - num_head
        last_stays = max(self._stays.values(), default=0)
        visits = tuple(self._traced(number, phases, first_head, last_stays) for number in range(len(self._units)))
        head = phases["head", first_head] if num_head else _Phase("head", first_head, 0, 0, 0)
        return VisitTrace(
            visits=visits,
            head_nbytes=head.peak_nbytes,
            head_rows=self.runner.head_rows,
            head_columns=self.runner.head_columns,
            head_parts=self.runner.head_parts,
            head_part_nbytes=self.runner.head_part_nbytes,
            guesses=self.counts.guesses,
            uncounted=tuple(self.counts.uncounted),
            head=head.work,
            dense_masks=tuple(self._dense_masks),
            logits_flops=self.runner.logits_flops,
        )

    def _traced(
        self, number: int, phases: Mapping[tuple[str, int], _Phase], first_head: int, last_stays: int
    ) -> TracedVisit:
        """Return the counts of one visit.

        Args:
            last_stays: Bytes in use between the last layer and the backward.
        """
        unit, is_head = self._graph.units[self._units[number]], number >= first_head
        counted = self._counted_visits.get(number, number)
        forward = phases.get(("forward", counted)) or phases["head", first_head]
        none = phases["head", first_head] if is_head else _Phase("backward", number, 0, 0, 0)  # no backward ran
        backward = phases.get(("backward", counted)) or none
        held_nbytes = (phases.get(("forward", number)) or forward).held_nbytes
        stays_nbytes = min(held_nbytes, self._stays.get(number, last_stays))
        graph_nbytes = self._graph_nbytes.get(counted, 0)
        # Parts are counted as if they got all tokens. Memory keeps this upper bound, but work is scaled by the share.
        memory = VisitMemory(held_nbytes, stays_nbytes, forward.peak_nbytes, backward.peak_nbytes, graph_nbytes)
        unneeded = self._unneeded.get(number, NOTHING_UNNEEDED)
        saved = tuple((tuple(t.shape), t.dtype) for t in self._saved.get(number, ()))
        reused = self._reused.get(number, {})
        attention, results = NOT_SAVABLE, NOT_SAVABLE
        if saved and not is_head and unit.part is None and not reused:
            attention, results = self._savable.get(number, (NOT_SAVABLE, NOT_SAVABLE))
        by_part = self.runner.by_part_in_head
        if not is_head:  # a look-up would run the unit again, but saved inputs can be read only once
            rows = self._only_rows.get(number, set()) & self._looked_up.get(number, set())
            by_part = frozenset() if saved else frozenset(rows)
        return TracedVisit(
            unit.index,
            is_head,
            has_backward=number in self._with_backward,
            saved=saved,
            memory=memory,
            forward=NO_WORK if is_head else forward.work.scaled(unit.share),
            backward=NO_WORK if is_head else (backward.work - unneeded.work).scaled(unit.share),
            by_part=by_part,
            attention=attention,
            results=results,
            reused=reused,
            chance_of_no_token=self._chances_of_no_token.get(number, 0.0),
            unneeded=replace(unneeded, work=unneeded.work.scaled(unit.share)),
        )


class GenerationTracer(Tracer):
    """Tracer for forwards that use a cache, with cache blocks of unlimited size.

    Attributes:
        units: Index of the unit, by visit.
    """

    def __init__(self, graph: ModelGraph, device: torch.device) -> None:
        super().__init__(graph, graph.dtype, device)
        self.units: dict[int, int] = {}

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, Tensor]]:
        self.units[visit] = unit.index
        with super().weights(unit, visit) as weights:
            yield weights

    def visits_of_forward(self) -> Iterator[TracedVisit]:
        """Yield the trace of each visit."""
        phases = {phase.visit: phase for phase in self._phases if phase.name == "forward"}
        for number, phase in phases.items():
            unit, counted = self.units[number], phases[self._counted_visits.get(number, number)]
            work = counted.work.scaled(self._graph.units[unit].share)
            memory = VisitMemory(phase.held_nbytes, 0, counted.peak_nbytes, 0, 0)
            chance = self._chances_of_no_token.get(number, 0.0)
            yield TracedVisit(unit, False, False, (), memory, forward=work, chance_of_no_token=chance)

    @contextmanager
    def cache_block(self, visit: int, micro_batch: int) -> Iterator[Tensor]:
        with self.counts.paused():
            room = torch.empty(_ANY_NBYTES, dtype=torch.uint8, device=self._device)
        yield room


class _Uses(TorchFunctionMode):
    """Mode that records how torch functions use weights.

    Args:
        owners: Names of weights, by id.

    Attributes:
        num_look_ups: Number of plain calls to `F.embedding`, by name of the weight.
        others: Names of the weights that are used in any other way.
    """

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()
        self._owners = owners
        self.num_look_ups = Counter[str]()
        self.others: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owners = [name for leaf in tree_leaves((args, kwargs)) if (name := self._owners.get(id(leaf))) is not None]
        result = func(*args, **kwargs)
        if owners and func is torch.nn.functional.embedding and _is_plain_look_up(*args, **kwargs):
            self.num_look_ups.update(owners)
        elif getattr(func, "__name__", "") not in METADATA_QUERIES and isinstance(result, Tensor):
            self.others.update(owners)
        return result


def _is_plain_look_up(
    indexes: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> bool:
    return max_norm is None and not scale_grad_by_freq and not sparse


class _TracedAccumulator(GradientAccumulator):
    """Accumulators that record the form of each parameter's gradients.

    Attributes:
        with_rows: Parameters that get gradients for single rows.
        with_others: Parameters that get gradients in any other form.
    """

    def __init__(self, targets: Mapping[str, Tensor], added: set[str]) -> None:
        super().__init__(targets, added)
        self.with_rows: set[str] = set()
        self.with_others: set[str] = set()

    def add(self, name: str, gradient: Tensor) -> None:
        self.with_others.add(name)
        super().add(name, gradient)

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0) -> None:
        self.with_others.add(name)
        super().add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, ignored: int | None = None) -> None:
        self.with_rows.add(name)
        super().add_rows(name, indexes, rows, ignored)

    @staticmethod
    def _multiply_half(target: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        # Use `mm`, because torch has no fake kernel that adds a half-precision product to an fp32 sum.
        torch.mm(left, right, out_dtype=target.dtype, out=target)
