"""Implementation of `BlockAccess` for traces."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.device.work import NO_WORK
from megatrain.engine.forward import LayerRunner, PassOrder
from megatrain.engine.head.objective import Objective
from megatrain.engine.program.visit_trace import TracedVisit, VisitTrace
from megatrain.engine.unit.absent_weights import METADATA_QUERIES
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.trace.counting import CountingError, CountingMode
from megatrain.trace.repeated_layers import CountedBackward, RepeatedLayers, gradient_allocators
from megatrain.trace.visit_counts import PhaseCounts, RecomputeMeter, VisitCounts

if TYPE_CHECKING:
    from megatrain.engine.unit.bound_unit import BoundUnit
    from megatrain.engine.unit.visit import UnitVisit
    from megatrain.models.converter import LayerPart
    from megatrain.models.graph import ModelGraph, Unit

_CACHE_NBYTES = 1 << 50  # a fake tensor needs no memory
_EMBEDDING_SIGNATURE = inspect.signature(torch.nn.functional.embedding)


class Tracer:
    """`BlockAccess` for an engine on fake tensors. Provides fake weights, and reads counters at every tick."""

    def __init__(
        self,
        graph: ModelGraph,
        dtype: torch.dtype,
        device: torch.device,
        *,
        order: PassOrder = PassOrder(),  # noqa: B008  -- frozen
        objective: Objective | None = None,
        is_compiled: bool = False,
    ) -> None:
        self.counts = CountingMode()
        self._dense_masks: dict[str, None] = {}  # ordered set of the reasons for dense masks
        self._shapes = {entry.name: entry.shape for layout in graph.layouts.values() for entry in layout.entries}
        self._graph, self._dtype, self._device, self._is_compiled = graph, dtype, device, is_compiled
        self._phase = PhaseCounts("forward", 0)  # counts of the current tick; replaced when the first tick begins
        self._visits = defaultdict[int, VisitCounts](VisitCounts)
        self._parts: dict[Any, VisitCounts] = {}  # kind of part -> visit that runs for all parts of the kind
        self._repeated = RepeatedLayers(self.counts)
        self.runner = LayerRunner(
            graph,
            self,
            device=device,
            order=order,
            objective=objective,
            context=partial(graph.pass_context, self._dense_masks.setdefault, is_compiled=is_compiled),
        )
        for bound in self.runner.bounds:
            if bound.unit.part is not None:
                bound.forward = self._run_once_per_kind(bound.unit.part, bound.forward)
            bound.forward = self._with_measurement(bound, self._with_fallback(bound))
        self.runner.visits.run_backward = self._backward

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a trace does not know the routing of tokens, and saves no results")

    skip_weights = announce_idle = results_block = _refuse

    def begin(self, phase: Literal["forward", "head", "backward"], visit: int) -> None:
        self.close()
        if phase != "forward" and self._phase.name == "forward":
            self._record_retained()  # record now, before the backward frees memory
        self.counts.peak_nbytes, self.counts.work = self.counts.live_nbytes, NO_WORK
        self.counts.new_nbytes.clear()
        self._phase = PhaseCounts(phase, visit, self.counts.live_nbytes, self.counts.num_storages)
        self._visits[visit].phases[phase] = self._phase

    def close(self) -> None:
        """Record the peak memory and the work of the current tick."""
        self._phase.peak_nbytes = self.counts.peak_nbytes - self._phase.held_nbytes
        self._phase.work = self.counts.work

    @property
    def _visit(self) -> VisitCounts:
        """Counts of the current visit."""
        return self._visits[self._phase.visit]

    def _record_retained(self) -> None:
        # Count storages that live from before a visit to the end of the last forward. Hidden states are freed earlier.
        for visit in self._visits.values():
            visit.retained_nbytes = self.counts.live_nbytes_before(visit.phases["forward"].first_storage)

    def _make_tensors(self, unit: Unit, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return tensors with the shapes of a unit's parameters. The trace does not count them."""
        with self.counts.pause():
            owners = {owner for _, owner, _ in unit.params}
            return {owner: torch.empty(self._shapes[owner], dtype=dtype, device=self._device) for owner in owners}

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, Tensor]]:
        self._visits[visit].unit = unit.index
        self._visits[visit].has_backward |= self._phase.name != "forward"
        yield self._make_tensors(unit, self._dtype)

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientAccumulator]:
        # The accumulators are not counted here: they are blocks, or the planner counts them.
        accumulator = _TracedAccumulator(self._make_tensors(unit, torch.float32), self._visits[visit].filled_params)
        yield accumulator
        self._visits[visit].row_params = accumulator.row_params - accumulator.other_params

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        with self.counts.pause():
            self._visits[visit].saved_inputs.append(tensor.clone())
        assert index == len(self._visits[visit].saved_inputs) - 1, (visit, index)

    def reuse_activation(self, visit: int, micro_batch: int, index: int, source: tuple[int, int]) -> None:
        self._visits[visit].saved_inputs.append(self._visits[source[0]].saved_inputs[source[1]])
        self._visits[visit].aliases[index] = source

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[Tensor]:
        yield self._visits[visit].saved_inputs[index]

    @contextmanager
    def cache_block(self, visit: int, micro_batch: int) -> Iterator[Tensor]:
        with self.counts.pause():
            block = torch.empty(_CACHE_NBYTES, dtype=torch.uint8, device=self._device)
        yield block

    def _with_fallback(self, bound: BoundUnit) -> Callable[..., Any]:
        """Wrap a unit's forward. If a layer fails on guessed values, the wrapper returns the layer's input.

        In this case, the gradients of the layer's parameters are counted, but not its operators.
        """
        forward = bound.forward

        def run_or_guess(*args: Any, **kwargs: Any) -> Any:
            work = self.counts.work
            with self.counts.within_unit(bound.unit.name), self._record_look_ups(bound):
                try:
                    return forward(*args, **kwargs)
                except (UnsupportedModelError, CountingError):
                    raise
                except Exception as error:
                    self.counts.work = work  # discard the work of an incomplete run
                    hidden_states = args[0] if args else kwargs.get("hidden_states")
                    if not bound.unit.is_layer or not isinstance(hidden_states, Tensor):
                        raise
                    self.counts.guess(
                        f"its forward failed on tensors without values ({type(error).__name__}: "
                        f"{str(error).partition(chr(10))[0]}); the plan assumes that it returns its input, without "
                        "other work or memory"
                    )
                    return hidden_states + sum(parameter.sum() * 0 for parameter in bound.unit.module.parameters())

        return run_or_guess

    @contextmanager
    def _record_look_ups(self, bound: BoundUnit) -> Iterator[None]:
        """Record the weights whose only use in a run is one look-up of rows with `F.embedding`."""
        uses = _WeightUses({id(leaf): owner for owner, leaf in bound.leaves()})
        with nullcontext() if bound.unit.is_layer or bound.unit.part is not None else uses:
            yield
        looked_up = {owner for owner, count in uses.num_look_ups.items() if count == 1} - uses.other_uses
        visit = self._visit
        visit.looked_up_params = looked_up if visit.looked_up_params is None else visit.looked_up_params & looked_up

    def _run_once_per_kind(self, part: LayerPart, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a part so that only the first of several equal parts runs and is counted.

        This saves time, because a large model has a thousand visits to parts.
        """

        def run_once(*args: Tensor) -> Tensor:
            visit, kind = self._visit, (part.kind, *(tuple(tensor.shape) for tensor in args))
            visit.no_token_probability = part.no_token_probability(args)
            first_visit = self._parts.setdefault(kind, visit)
            if first_visit is visit:
                return cast("Tensor", forward(*args))
            visit.equal_part = first_visit
            return part.placeholder_result(args)  # weight gradients are counted for the part that runs

        return run_once

    def _with_measurement(self, bound: BoundUnit, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a unit's forward so that it measures the graph and finds unneeded matmuls in a recompute."""

        def measure(*args: Any, **kwargs: Any) -> Any:
            if self._phase.name != "backward":
                if not torch.is_grad_enabled():  # no backward follows
                    return forward(*args, **kwargs)
                return self._repeated.forward(bound, self._phase.visit, forward, *args, **kwargs)
            num_guesses = self.counts.num_guesses
            is_compiled = self._is_compiled and bound.unit.is_layer
            meter = RecomputeMeter({} if is_compiled else bound.matrices(), self.counts)
            with meter.measure():
                value = forward(*args, **kwargs)
            # Skip units with guesses, because a real run can take a different path. Also skip parts, because their
            # number of tokens is unknown.
            is_known = self.counts.num_guesses == num_guesses and bound.unit.part is None
            self._visit.recompute = meter.result(value, self._visit.saved_inputs, is_known=is_known)
            return value

        return measure

    def _backward(self, visit: UnitVisit, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run a visit's backward, or copy the counts of an equal backward that has already run."""
        key = self._repeated.key(visit.index, gradients)
        if key is not None and (earlier := self._repeated.find(key)) is not None:
            return visit.replace_backward(partial(self._copy_counts, earlier, visit))
        num_guesses = self.counts.num_guesses
        input_gradients = visit.backward(gradients)
        phase = self._phase
        assert (phase.name, phase.visit) == ("backward", visit.index)
        allocators = gradient_allocators(input_gradients, phase.first_storage, self.counts)
        if key is not None and allocators is not None and self.counts.num_guesses == num_guesses:
            peak_nbytes = self.counts.peak_nbytes - phase.held_nbytes
            unit, recompute = visit.bound.unit, self._visits[visit.index].recompute
            self._repeated.store(key, CountedBackward(unit, self.counts.work, peak_nbytes, allocators, recompute))
        return input_gradients

    def _copy_counts(self, earlier: CountedBackward, visit: UnitVisit) -> list[Tensor | None]:
        counts, visit_counts = self.counts, self._visits[visit.index]
        counts.work += earlier.work
        counts.peak_nbytes = max(counts.peak_nbytes, counts.live_nbytes + earlier.peak_nbytes)
        visit_counts.has_backward = True
        pairs = zip(earlier.unit.params, visit.bound.unit.params, strict=True)
        visit_counts.recompute = earlier.recompute.rename({old: new for (_, old, _), (_, new, _) in pairs})
        return [None if allocate is None else allocate() for allocate in earlier.allocators]

    def trunk_visits(self) -> Iterator[TracedVisit]:
        """Yield the trace of each visit outside of the head."""
        for visit in self._visits.values():
            if "forward" in visit.phases:
                yield visit.to_visit(self._graph.units[visit.unit])

    def trace(self) -> VisitTrace:
        """Return the trace of the forward and backward that have run."""
        if self._phase.name == "forward":
            self._record_retained()
        visits = list(self._visits.values())
        start = len(visits) - len(self.runner.head.units)
        head = visits[start].phases["head"] if self.runner.head.units else PhaseCounts("head", start)
        retained_nbytes = max((visit.retained_nbytes for visit in visits), default=0)
        head_visits = (
            visit.to_head_visit(head, retained_nbytes, self.runner.head.partwise_params) for visit in visits[start:]
        )
        return VisitTrace(
            visits=(*self.trunk_visits(), *head_visits),
            head_nbytes=head.peak_nbytes,
            head_rows=self.runner.head.rows,
            head_columns=self.runner.head.columns,
            head_parts=self.runner.head.parts,
            head_part_nbytes=self.runner.head.part_nbytes,
            guesses=self.counts.guesses,
            uncounted_ops=tuple(self.counts.uncounted_ops),
            head=head.work,
            dense_masks=tuple(self._dense_masks),
            logits_flops=self.runner.head.logits_flops,
        )


class _WeightUses(TorchFunctionMode):
    """Mode that records how torch functions use weights.

    Args:
        owners: Names of weights, by id.

    Attributes:
        num_look_ups: Number of plain calls to `F.embedding`, by name of the weight.
        other_uses: Names of the weights that are used in any other way.
    """

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()
        self._owners = owners
        self.num_look_ups = Counter[str]()
        self.other_uses: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owners = [name for leaf in tree_leaves((args, kwargs)) if (name := self._owners.get(id(leaf))) is not None]
        result = func(*args, **kwargs)
        if owners and func is torch.nn.functional.embedding and _is_plain_look_up(*args, **kwargs):
            self.num_look_ups.update(owners)
        elif getattr(func, "__name__", "") not in METADATA_QUERIES and isinstance(result, Tensor):
            self.other_uses.update(owners)
        return result


def _is_plain_look_up(*args: Any, **kwargs: Any) -> bool:
    arguments = _EMBEDDING_SIGNATURE.bind(*args, **kwargs).arguments
    return arguments.get("max_norm") is None and not arguments.get("scale_grad_by_freq") and not arguments.get("sparse")


class _TracedAccumulator(GradientAccumulator):
    """Accumulators that record the form of each parameter's gradients.

    Attributes:
        row_params: Parameters that get gradients for single rows.
        other_params: Parameters that get gradients in any other form.
    """

    def __init__(self, targets: Mapping[str, Tensor], added_names: set[str]) -> None:
        super().__init__(targets, added_names)
        self.row_params, self.other_params = set[str](), set[str]()

    def add(self, name: str, gradient: Tensor) -> None:
        self.other_params.add(name)
        super().add(name, gradient)

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0) -> None:
        self.other_params.add(name)
        super().add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, padding_idx: int | None = None) -> None:
        self.row_params.add(name)
        super().add_rows(name, indexes, rows, padding_idx)

    @staticmethod
    def _multiply_half(target: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        # Use `mm`, because torch has no fake kernel that adds a half-precision product to an fp32 sum.
        torch.mm(left, right, out_dtype=target.dtype, out=target)
