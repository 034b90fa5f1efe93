"""Counts that a trace collects, one record for each visit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch.autograd.graph import saved_tensors_hooks

from megatrain.engine.device.work import NO_PRODUCTS, NO_WORK, NOT_SAVABLE, SavableResults, SkippedProducts, Work
from megatrain.engine.program.visit_trace import TracedVisit, VisitMemory
from megatrain.engine.unit.saved_results import ResultSizes
from megatrain.engine.unit.unneeded import ProductUses
from megatrain.trace.counting import CountingMode, count_flops, tensors_in
from tiered.units import round_up

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatrain.models.graph import Unit

_ALIGNMENT_BYTES = 512  # allocators round sizes up to a multiple of this


@dataclass(slots=True)
class PhaseCounts:
    """Memory and work of one tick.

    Attributes:
        held_nbytes: Bytes in use at the start.
        first_storage: Number of storages created before the tick.
        peak_nbytes: Peak memory in addition to `held_nbytes`.
    """

    name: Literal["forward", "head", "backward"]
    visit: int
    held_nbytes: int = 0
    first_storage: int = 0
    peak_nbytes: int = 0
    work: Work = NO_WORK


@dataclass(frozen=True, slots=True)
class RecomputeCounts:
    """Counts for a recompute, and the results that it can skip or load.

    Attributes:
        graph_nbytes: Size of the graph if it is kept for the backward.
        attention: Attention results that can be saved.
        results: Attention results and matmul results that can be saved.
    """

    graph_nbytes: int = 0
    attention: SavableResults = NOT_SAVABLE
    results: SavableResults = NOT_SAVABLE
    unneeded_products: SkippedProducts = NO_PRODUCTS

    def rename(self, names: Mapping[str, str]) -> RecomputeCounts:
        """Return a copy for a layer whose parameters have other names."""
        weights = frozenset(names[name] for name in self.unneeded_products.weights)
        return replace(self, unneeded_products=replace(self.unneeded_products, weights=weights))


class RecomputeMeter:
    """Meter of one visit's recompute: graph size, savable results and unneeded matmuls.

    Args:
        matrices: Names of the unit's weights, by id.
    """

    def __init__(self, matrices: Mapping[int, str], counts: CountingMode) -> None:
        self._uses, self._sizes = ProductUses(matrices, count_flops), ResultSizes(matrices, count_flops)
        self._counts, self._saved_storages = counts, set[int | None]()  # indexes of storages that autograd saved

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the operators within the context."""
        self._counts.on_launch = self._uses.record_launch
        try:
            with (
                saved_tensors_hooks(self._pack, lambda tensor: tensor),
                self._uses.track(),
                self._sizes.measure(),
            ):
                yield
        finally:
            self._counts.on_launch = None

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved_storages.add(self._counts.storage_index(tensor))
        self._uses.record_saved(tensor)
        return tensor

    def result(self, value: Any, inputs: Sequence[Tensor], *, is_known: bool) -> RecomputeCounts:
        """Return the recompute's counts. The graph is the inputs and all live storages created in the visit's backward.

        Args:
            value: Result of the unit. Its tensors are not part of the graph if autograd has not saved them.
            inputs: Inputs that are kept until the backward.
            is_known: Whether a real run executes the same operators on the same number of tokens.
        """
        live_nbytes, tensors = dict(self._counts.new_nbytes), tensors_in(value)
        for tensor in tensors:
            if self._counts.storage_index(tensor) not in self._saved_storages:
                live_nbytes.pop(tensor.untyped_storage()._cdata, None)
        graph_nbytes = sum(tensor.untyped_storage().nbytes() for tensor in inputs)
        graph_nbytes += sum(round_up(nbytes, _ALIGNMENT_BYTES) for nbytes in live_nbytes.values())
        products = self._uses.find_unneeded(tensors) if is_known else NO_PRODUCTS
        return RecomputeCounts(graph_nbytes, self._sizes.attention, self._sizes.results(products.weights), products)


@dataclass(slots=True)
class VisitCounts:
    """Counts of one visit, filled while the engine runs.

    Attributes:
        unit: Index of the unit.
        phases: Counts of the visit's ticks, by phase.
        retained_nbytes: Bytes in use at the start of the visit that stay in use until its backward.
        saved_inputs: Inputs that are kept until the backward.
        aliases: Maps an input's index to the (visit, index) of an earlier input that is the same tensor.
        equal_part: Visit to an equal part, which ran in place of this visit. None if this visit ran.
        looked_up_params: Parameters that each run uses only once, to look up rows. None before the first run.
        filled_params: Parameters that have gradients.
        row_params: Parameters that get only row gradients.
    """

    unit: int = -1
    phases: dict[str, PhaseCounts] = field(default_factory=dict)
    retained_nbytes: int = 0
    saved_inputs: list[Tensor] = field(default_factory=list)
    aliases: dict[int, tuple[int, int]] = field(default_factory=dict)
    equal_part: VisitCounts | None = None
    no_token_probability: float = 0.0
    looked_up_params: set[str] | None = None
    filled_params: set[str] = field(default_factory=set)
    row_params: set[str] = field(default_factory=set)
    has_backward: bool = False
    recompute: RecomputeCounts = RecomputeCounts()

    @property
    def saved_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shapes and dtypes of the saved inputs."""
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in self.saved_inputs)

    def to_head_visit(self, head: PhaseCounts, retained_nbytes: int, params: frozenset[str]) -> TracedVisit:
        """Return the trace of a visit in the head phase, whose work is counted for the whole head.

        Args:
            retained_nbytes: Bytes in use between the last layer and the backward.
            params: Parameters that the head processes one part at a time.
        """
        retained_nbytes = min(head.held_nbytes, retained_nbytes)
        memory = VisitMemory(head.held_nbytes, retained_nbytes, head.peak_nbytes, head.peak_nbytes, 0)
        return TracedVisit(
            self.unit, True, self.has_backward, self.saved_shapes, memory, partwise_params=params, aliases=self.aliases
        )

    def to_visit(self, unit: Unit) -> TracedVisit:
        """Return the trace of a visit outside of the head."""
        source = self.equal_part or self
        forward = source.phases["forward"]
        backward = source.phases.get("backward") or PhaseCounts("backward", forward.visit)  # no backward ran
        peaks = forward.peak_nbytes, backward.peak_nbytes
        held_nbytes, recompute = self.phases["forward"].held_nbytes, source.recompute
        # Parts are counted as if they got all tokens. Memory keeps this bound; work is scaled by the expected share.
        memory = VisitMemory(held_nbytes, min(held_nbytes, self.retained_nbytes), *peaks, recompute.graph_nbytes)
        saved_shapes = self.saved_shapes
        # If inputs are saved, do not lease by part: looking up rows would read the inputs again, which is not possible.
        partwise_params = frozenset() if saved_shapes else frozenset(self.row_params & (self.looked_up_params or set()))
        is_savable = saved_shapes and unit.part is None and not self.aliases
        products = recompute.unneeded_products
        return TracedVisit(
            unit.index,
            False,
            has_backward=self.has_backward,
            saved_inputs=saved_shapes,
            memory=memory,
            forward=forward.work.scale(unit.share),
            backward=(backward.work - products.work).scale(unit.share),
            partwise_params=partwise_params,
            attention=recompute.attention if is_savable else NOT_SAVABLE,
            results=recompute.results if is_savable else NOT_SAVABLE,
            aliases=self.aliases,
            no_token_probability=self.no_token_probability,
            unneeded_products=replace(products, work=products.work.scale(unit.share)),
        )
