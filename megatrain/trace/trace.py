"""Trace of one forward and backward without computing: the visited units, and the memory and work of each visit.

The engine itself runs, on fake tensors: shapes and dtypes are real, storages are not. The tracer is its `BlockAccess`,
and reads the counters at every tick. If a model reads values (a mixture of experts that loops over the experts with
tokens), the trace guesses them and reports that its byte counts are estimates.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.absent_weights import METADATA_QUERIES
from megatrain.engine.arguments import tree_map
from megatrain.engine.attention import AttentionCall
from megatrain.engine.device_kernels import stands_for_gpu
from megatrain.engine.flash import planned_flash
from megatrain.engine.forward import LayerRunner, PassOrder, move_buffers
from megatrain.engine.generate import GenerationRunner
from megatrain.engine.objective import Objective
from megatrain.engine.program import KEEP_NOTHING, Recompute, TracedVisit, VisitMemory, VisitTrace
from megatrain.engine.saved_results import NOT_SAVABLE, ResultSizes, Savable
from megatrain.engine.unneeded import NOTHING_UNNEEDED, ProductUses, Unneeded, changed_arguments
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.engine.work import NO_WORK, Work, moved_nbytes
from megatrain.models.skeleton import reads_more_than_text, rows_are_documents
from megatrain.trace.kernel_work import kernels_counted
from megatrain.trace.repeated_layers import CountedBackward, Recorder, RepeatedLayers, gradients_of
from tiered.units import round_up

if TYPE_CHECKING:
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedModel

    from megatrain.engine.bound_unit import BoundUnit
    from megatrain.engine.visit import UnitVisit
    from megatrain.models.converter import LayerPart
    from megatrain.models.graph import ModelGraph, Unit

__all__ = [
    "CountingError",
    "CountingMode",
    "StepFlops",
    "count_flops",
    "is_counted",
    "step_flops",
    "trace_generation",
    "trace_visits",
]

_RAISES = 2  # torch's debug mode in which an operation without a deterministic kernel raises
_ALIGNMENT_BYTES = 512  # allocators round sizes up to it
_TRACED_PIECES = 2  # of the head: the first piece begins the gradient, the others add to it
_IMAGES_UNCOUNTED = "images: their number in a step is not known beforehand"
_ANY_NBYTES = 1 << 50  # of a fake tensor
_LOSS_NBYTES = 4  # bytes of each piece that stay until the end of the step
_DEVICE_OF = torch.ops.prim.device.default


def trace_visits(
    graph: ModelGraph,
    batch_size: int,
    seq_len: int,
    compute_dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    head_rows: int | None = None,
    head_columns: int | None = None,
    objective: Objective | None = None,
    padded: bool = True,
    is_compiled: bool = False,
    example: Mapping[str, Tensor] | None = None,
    top_k: int | None = None,
) -> VisitTrace:
    """Trace a micro-batch of `batch_size` x `seq_len` tokens, all with a label.

    Args:
        graph: Model, which does not change. Nothing is allocated on `device`.
        batch_size: Rows of the micro-batch.
        seq_len: Tokens per row.
        compute_dtype: Dtype of the graph.
        device: Compute device: kernels and their workspaces differ between devices.
        padded: Whether rows may have padding or hold several documents. If not, each row is one document.
        is_compiled: Whether layers are compiled, for `ModelGraph.computing`. If not, rows of several documents may
            count with the memory of rows of one document.
        example: Micro-batch of that size with images, on the host. The trace knows the values that the model reads on
            the host: numbers and sizes of images. None if all is text.
        top_k: Number of likeliest tokens to score, in a trace of only a forward. None for forward and backward.

    Raises:
        UnsupportedModelError: If the model cannot be streamed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = _with_index(torch.device(device))
    num_tokens, objective = batch_size * seq_len, objective or Objective()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_buffers(graph.model, device, fake):
        tracer = _Tracer(graph, compute_dtype, device, head_rows, head_columns, objective, is_compiled)
        with fake, tracer.counts:
            with tracer.counts.paused():
                ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
                batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
            # Outside of the pause, because pixels are held during the whole step.
            for name, value in (example or {}).items():
                batch[name] = torch.empty(value.shape, dtype=value.dtype, device=device)
                tracer.counts.know(batch[name], value)
            with tracer.counts.paused():
                # All pieces of the head are equal: a few are traced, the rest is added below.
                num_rows = min(num_tokens, _TRACED_PIECES * tracer.runner.head_rows) or num_tokens
                rows = torch.zeros(num_rows, dtype=torch.long, device=device)
                loss = objective.loss.of_micro_batch({}, objective.loss.synthetic_inputs(num_rows, device), None)
            with (
                _lists_are_read(),
                kernels_counted(tracer.counts.book),
                nullcontext() if padded else rows_are_documents(),
                _failures_explained(graph.model, "text" if example is None else "images"),
            ):
                if top_k is None:
                    tracer.runner.run_pass({0: batch}, {0: (rows, rows)}, {0: loss}, num_tokens, 0)
                else:
                    list(tracer.runner.score_pass({0: batch}, {0: (rows, rows)}, top_k, 1.0))
            tracer.close()
    trace = tracer.trace()
    if top_k is not None:
        trace = replace(trace, logits_flops=0)  # a forward computes the logits once
    trace = _with_all_pieces(trace, num_rows, num_tokens, objective.loss.row_nbytes)
    return trace if example is None else replace(trace, uncounted=(*trace.uncounted, _IMAGES_UNCOUNTED))


def trace_generation(
    graph: ModelGraph,
    batch_size: int,
    seq_len: int,
    *,
    device: torch.device | str = "cpu",
) -> tuple[VisitTrace, dict[int, int]]:
    """Trace a forward that fills the model's cache with `batch_size` x `seq_len` tokens.

    Args:
        graph: Model, which does not change. Nothing is allocated on `device`.
        batch_size: Prompts of a micro-batch.
        seq_len: Tokens of a prompt and its completion together.

    Returns:
        The trace, without visits of a head, and visit -> bytes of its cache.

    Raises:
        UnsupportedModelError: If the model cannot generate, or not with streamed weights.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import DynamicCache

    device = _with_index(torch.device(device))
    if not graph.model.can_generate():
        raise UnsupportedModelError(type(graph.model).__name__, "it has no head that generates text")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_buffers(graph.model, device, fake):
        tracer = _GenerationTracer(graph, graph.dtype, device, None, None, None, False)
        runner = GenerationRunner(graph, tracer, device=device, bounds=tracer.runner.bounds)
        cache = DynamicCache(config=graph.config.get_text_config(decoder=True))
        with fake, tracer.counts:
            with tracer.counts.paused():
                ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
                batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

            def forward() -> Any:
                return graph.model(**batch, past_key_values=cache, use_cache=True, logits_to_keep=1)

            with (
                _lists_are_read(),
                kernels_counted(tracer.counts.book),
                _failures_explained(graph.model, "text"),
            ):
                try:
                    runner.run([forward], [cache], [0])
                except TypeError as error:
                    name = type(graph.model).__name__
                    raise UnsupportedModelError(name, f"its forward does not run with a cache ({error})") from error
            tracer.close()
    visits = tuple(tracer.visits_of_forward())
    trace = VisitTrace(
        visits,
        0,
        0,
        guesses=tracer.counts.guesses,
        uncounted=tuple(tracer.counts.uncounted),
        num_tokens=batch_size * seq_len,
    )
    return trace, runner.kept_nbytes


def _with_index(device: torch.device) -> torch.device:
    """Return the device with its index. Without an index, operators on fake tensors would ask the driver for it."""
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


@contextmanager
def _fake_buffers(model: nn.Module, device: torch.device, fake: FakeTensorMode) -> Iterator[None]:
    """Replace a model's buffers by fake copies on the compute device."""
    before = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        with fake:
            move_buffers(model, device)
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


@contextmanager
def _failures_explained(model: PreTrainedModel, inputs: Literal["text", "images"]) -> Iterator[None]:
    """Explain an error of a model that also reads images, on text alone or on prepared images."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # the code of each family raises different types
        if not reads_more_than_text(model):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if inputs == "images":
            raise UnsupportedModelError(
                type(model).__name__,
                f"its forward cannot be planned with what the folder's processor makes of images ({reason}). Compare "
                'the processor\'s files with those of the published model, or write model.images = "off"',
            ) from error
        raise UnsupportedModelError(
            type(model).__name__,
            f"only text can be trained, and its forward does not run on text alone ({reason}). Take a text model",
        ) from error


def _with_all_pieces(trace: VisitTrace, num_rows: int, num_tokens: int, row_nbytes: int) -> VisitTrace:
    """Return the trace of a head of ``num_tokens`` rows, given the trace of its first ``num_rows``.

    The traced run computed all parts of the vocabulary except the last a second time. That is not work of the model.
    """
    again = trace.logits_flops * num_tokens * (trace.head_parts - 1) // trace.head_parts
    num_more = -(-(num_tokens - num_rows) // (trace.head_rows or num_tokens))
    nbytes = _LOSS_NBYTES * num_more + row_nbytes * num_tokens
    head = trace.head
    num_traced = -(-num_rows // (trace.head_rows or num_tokens))
    head = Work(
        product_flops=head.product_flops * num_tokens // num_rows - again,
        attention_flops=head.attention_flops * num_tokens // num_rows,
        skipped_flops=head.skipped_flops * num_tokens // num_rows,
        moved_nbytes=head.moved_nbytes * num_tokens // num_rows,
        launches=head.launches * (num_traced + num_more) // num_traced,
    )

    def with_rows(memory: VisitMemory) -> VisitMemory:
        peaks = {"forward_nbytes": memory.forward_nbytes + nbytes, "backward_nbytes": memory.backward_nbytes + nbytes}
        return replace(memory, **peaks)

    visits = tuple(replace(visit, memory=with_rows(visit.memory)) if visit.is_head else visit for visit in trace.visits)
    return replace(
        trace,
        visits=visits,
        num_tokens=num_tokens,
        head_nbytes=trace.head_nbytes + nbytes,
        head=head,
        logits_flops=trace.logits_flops * num_tokens,
    )


@dataclass(slots=True)
class _Phase:
    """Counts of one tick."""

    name: str
    visit: int
    held_nbytes: int
    peak_nbytes: int
    first_storage: int
    work: Work = NO_WORK


class _Tracer:
    """Engine run on fake tensors. Its `BlockAccess` provides fake weights and reads the counts at every tick."""

    def __init__(
        self,
        graph: ModelGraph,
        dtype: torch.dtype,
        device: torch.device,
        head_rows: int | None,
        head_columns: int | None,
        objective: Objective | None,
        is_compiled: bool,
    ) -> None:
        self.counts = CountingMode()
        self._dense_masks: dict[str, None] = {}  # in the order of their first use
        self._shapes = {entry.name: entry.shape for layout in graph.layouts.values() for entry in layout.entries}
        self._graph, self._dtype, self._device, self._is_compiled = graph, dtype, device, is_compiled
        self._phases: list[_Phase] = []
        self._saved: dict[int, list[Tensor]] = {}
        self._counted: dict[Any, int] = {}  # kind of part -> its counted visit
        self._alike: dict[int, int] = {}  # visit of a part -> counted visit of its kind
        self._misses: dict[int, float] = {}  # visit of a part -> chance that a token is not routed to it
        self._reused: dict[int, dict[int, tuple[int, int]]] = {}
        self._units: list[int] = []
        self._with_backward: set[int] = set()
        self._graph_nbytes: dict[int, int] = {}
        self._savable: dict[int, tuple[Savable, Savable]] = {}  # visit -> results of attention, and of all products
        self._unneeded: dict[int, Unneeded] = {}
        self._filled: dict[int, set[str]] = {}
        self._only_rows: dict[int, set[str]] = {}  # visit -> parameters whose gradients are only rows
        self._looked_up: dict[int, set[str]] = {}  # visit -> parameters that are only looked up in
        self._stays: dict[int, int] = {}  # visit -> bytes
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
                bound.forward = self._once(bound.unit.part, bound.forward)
            bound.forward = self._measured(bound, self._guessing(bound))
        self.runner.visits.run_backward = self._backward

    def skip_weights(self, unit: Unit, visit: int) -> None:
        raise AssertionError("a trace does not know the routing of tokens")

    def note_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        raise AssertionError("a trace does not know the routing of tokens")

    def begin(self, phase: Literal["forward", "head", "backward"], visit: int) -> None:
        self.close()
        if phase != "forward" and not any(earlier.name != "forward" for earlier in self._phases):
            self._note_visits()  # the forward is over, and the backward has not yet freed the visits' shared memory
        self.counts.peak_nbytes, self.counts.work = self.counts.live_nbytes, NO_WORK
        self.counts.new_nbytes.clear()
        self._phases.append(_Phase(phase, visit, self.counts.live_nbytes, 0, self.counts.num_storages))

    def close(self) -> None:
        """Read the peak and the work of the tick that ends."""
        if self._phases:
            self._phases[-1].peak_nbytes = self.counts.peak_nbytes - self._phases[-1].held_nbytes
            self._phases[-1].work = self.counts.work

    def _note_visits(self) -> None:
        self._units = [visit.bound.unit.index for visit in self.runner.visits] + list(self.runner.head_units)
        # Made before a visit and live at the end of the forward, so not a stream: the next visit would make a new one.
        for phase in self._phases:
            if phase.name == "forward":
                self._stays[phase.visit] = self.counts.nbytes_made_before(phase.first_storage)

    # -- blocks ------------------------------------------------------------------------------------------------

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
        with self.counts.paused():  # these are blocks, or counted by the planner
            targets = {name: torch.empty(self._shapes[name], device=self._device) for name in names}
        accumulator = _TracedAccumulator(targets, self._filled.setdefault(visit, set()))
        yield accumulator
        self._only_rows[visit] = accumulator.with_rows - accumulator.with_more

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

    def results_room(self, visit: int, micro_batch: int) -> NoReturn:
        raise AssertionError("a trace measures results, and saves none")

    # -- the units' forwards ------------------------------------------------------------------------------------

    def _guessing(self, bound: BoundUnit) -> Callable[..., Any]:
        """Return the unit's forward. If a layer fails on guessed values, its input is taken as its output.

        The gradients of its parameters are still counted, but nothing that it computes inside.
        """
        forward = bound.forward

        def guess(*args: Any, **kwargs: Any) -> Any:
            work = self.counts.work
            with self.counts.inside(bound.unit.name), self._noting_look_ups(bound):
                try:
                    return forward(*args, **kwargs)
                except (UnsupportedModelError, CountingError):
                    raise
                except Exception as error:
                    self.counts.work = work  # drop the work before the failure, which is only a part
                    stream = args[0] if args else kwargs.get("hidden_states")
                    if not bound.unit.is_layer or not isinstance(stream, Tensor):
                        raise
                    self.counts.guess(
                        f"its forward failed on tensors without values ({type(error).__name__}: "
                        f"{str(error).partition(chr(10))[0]}); planned as if it returned its input, without the memory "
                        "it uses inside"
                    )
                    return stream + sum(parameter.sum() * 0 for parameter in bound.unit.module.parameters())

        return guess

    @contextmanager
    def _noting_look_ups(self, bound: BoundUnit) -> Iterator[None]:
        """Record the weights of a unit whose rows a run takes once, by `F.embedding`, without other uses."""
        uses = _Uses({id(leaf): owner for owner, leaf in bound.leaves()})
        with nullcontext() if bound.unit.is_layer or bound.unit.part is not None else uses:
            yield
        found = {owner for owner, count in uses.num_look_ups.items() if count == 1} - uses.others
        visit = self._phases[-1].visit
        self._looked_up[visit] = self._looked_up.get(visit, found) & found

    def _once(self, part: LayerPart, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a part. Only one of all equal parts runs and is counted.

        A large model has a thousand such visits.
        """

        def once(*args: Tensor) -> Tensor:
            visit, kind = self._phases[-1].visit, (part.kind, *(tuple(tensor.shape) for tensor in args))
            self._alike[visit] = self._counted.setdefault(kind, visit)
            self._misses[visit] = part.chance_of_no_token(args)
            if self._alike[visit] == visit:
                return cast("Tensor", forward(*args))
            return part.uncomputed(args)  # the counts of the other visit include the gradients of its weights

        return once

    def _measured(self, bound: BoundUnit, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a unit's forward that measures a recompute: the graph that it builds, and its unneeded products."""

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
                uses.note_saved(tensor)
                return tensor

            sizes = ResultSizes(matrices, count_flops)
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            self.counts.on_launch = uses.note_launch
            try:
                with hooks, uses.following(), sizes.measuring():
                    value = forward(*args, **kwargs)
            finally:
                self.counts.on_launch = None
            self._note_graph(value, saved)
            # After a guess, a run may take a different path. For a part, the number of its tokens is unknown.
            if self.counts.num_guesses == num_guesses and bound.unit.part is None:
                self._unneeded[visit] = uses.unneeded(_tensors(value))
            unneeded = self._unneeded.get(visit, NOTHING_UNNEEDED)
            self._savable[visit] = (sizes.attention, sizes.results(unneeded.weights))
            return value

        return measured

    def _backward(self, visit: UnitVisit, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward of a visit, or copy the counts of an earlier visit with an equal backward."""
        key = self._repeated.key(visit.number, gradients)
        if key is not None and (earlier := self._repeated.earlier(key)) is not None:
            return visit.replaced_backward(partial(self._counted_as, earlier, visit))
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

    def _counted_as(self, earlier: CountedBackward, visit: UnitVisit) -> list[Tensor | None]:
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
        return [None if gradient is None else gradient.made() for gradient in earlier.gradients]

    def _note_graph(self, value: Any, saved: Collection[int | None]) -> None:
        """Record the size of a recompute's graph: the live storages that the visit made since its backward began.

        Args:
            value: Result of the unit, held by the rest of the model. The graph holds the saved tensors in it.
            saved: Numbers of the storages that autograd saved. Addresses may have been reused by now.
        """
        alive = dict(self.counts.new_nbytes)

        def forget(leaf: Any) -> None:
            if isinstance(leaf, Tensor) and self.counts.number_of(leaf) not in saved:
                alive.pop(leaf.untyped_storage()._cdata, None)

        tree_map(value, forget)
        visit = self._phases[-1].visit
        inputs = sum(tensor.untyped_storage().nbytes() for tensor in self._saved.get(visit, ()))
        self._graph_nbytes[visit] = inputs + sum(round_up(nbytes, _ALIGNMENT_BYTES) for nbytes in alive.values())

    # -- the result --------------------------------------------------------------------------------------------

    def trace(self) -> VisitTrace:
        """Return the trace."""
        if not self._units:  # only a forward, of a model that is not cut
            self._note_visits()
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
            phases: Counts by name of the phase and visit.
            first_head: First visit of the head.
            last_stays: Bytes that stay until the backward after the last layer.
        """
        unit, is_head = self._graph.units[self._units[number]], number >= first_head
        counted = self._alike.get(number, number)
        forward = phases.get(("forward", counted)) or phases["head", first_head]
        none = phases["head", first_head] if is_head else _Phase("backward", number, 0, 0, 0)  # only a forward
        backward = phases.get(("backward", counted)) or none
        held_nbytes = (phases.get(("forward", number)) or forward).held_nbytes
        stays_nbytes = min(held_nbytes, self._stays.get(number, last_stays))
        graph_nbytes = self._graph_nbytes.get(counted, 0)
        # A part was counted with all tokens, which bounds the memory. Its work is scaled to its share.
        memory = VisitMemory(held_nbytes, stays_nbytes, forward.peak_nbytes, backward.peak_nbytes, graph_nbytes)
        unneeded = self._unneeded.get(number, NOTHING_UNNEEDED)
        saved = tuple((tuple(t.shape), t.dtype) for t in self._saved.get(number, ()))
        reused = self._reused.get(number, {})
        attention, results = NOT_SAVABLE, NOT_SAVABLE
        if saved and not is_head and unit.part is None and not reused:
            attention, results = self._savable.get(number, (NOT_SAVABLE, NOT_SAVABLE))
        by_part = self.runner.by_part_in_head
        if not is_head:  # saved inputs are read for one run, and a look-up of rows would be another run
            rows = self._only_rows.get(number, set()) & self._looked_up.get(number, set())
            by_part = frozenset() if saved else frozenset(rows)
        return TracedVisit(
            unit.index,
            is_head,
            has_backward=number in self._with_backward,
            saved=saved,
            memory=memory,
            forward=NO_WORK if is_head else forward.work.of_share(unit.share),
            backward=NO_WORK if is_head else (backward.work - unneeded.work).of_share(unit.share),
            by_part=by_part,
            attention=attention,
            results=results,
            reused=reused,
            chance_of_no_token=self._misses.get(number, 0.0),
            unneeded=replace(unneeded, work=unneeded.work.of_share(unit.share)),
        )


class _GenerationTracer(_Tracer):
    """Tracer of forwards that use a cache. Its cache blocks have no limit.

    Attributes:
        units: Visit -> index of its unit.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.units: dict[int, int] = {}

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, Tensor]]:
        self.units[visit] = unit.index
        with super().weights(unit, visit) as weights:
            yield weights

    def visits_of_forward(self) -> Iterator[TracedVisit]:
        """Yield the counts of each visit."""
        phases = {phase.visit: phase for phase in self._phases if phase.name == "forward"}
        for number, phase in phases.items():
            unit, counted = self.units[number], phases[self._alike.get(number, number)]
            work = counted.work.of_share(self._graph.units[unit].share)
            memory = VisitMemory(phase.held_nbytes, 0, counted.peak_nbytes, 0, 0)
            chance = self._misses.get(number, 0.0)
            yield TracedVisit(unit, False, False, (), memory, forward=work, chance_of_no_token=chance)

    @contextmanager
    def cache_room(self, visit: int, micro_batch: int) -> Iterator[Tensor]:
        with self.counts.paused():
            room = torch.empty(_ANY_NBYTES, dtype=torch.uint8, device=self._device)
        yield room


class _Uses(TorchFunctionMode):
    """Mode that counts the uses of weights by functions of torch.

    Args:
        owners: Id of a weight -> its owner's name.

    Attributes:
        num_look_ups: Plain calls of `F.embedding`, by owner's name.
        others: Owners' names of weights with other uses.
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


@contextmanager
def _lists_are_read() -> Iterator[None]:
    """Support ``torch.tensor([scalars])`` under fake tensors, which torch reads outside of dispatch.

    Not a mode of torch functions: modes are off while such a function runs, and a forward may be suspended in one.
    """
    before = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, list | tuple):
            data = tree_map(data, lambda item: item.item() if isinstance(item, Tensor) else item)
        return before(data, *args, **kwargs)

    torch.tensor = tensor
    try:
        yield
    finally:
        torch.tensor = before


class _TracedAccumulator(GradientAccumulator):
    """Accumulators that only take memory and FLOPs.

    Attributes:
        with_rows: Parameters to which rows were added.
        with_more: Parameters to which something else was added.
    """

    def __init__(self, targets: Mapping[str, Tensor], added: set[str]) -> None:
        super().__init__(targets, added)
        self.with_rows: set[str] = set()
        self.with_more: set[str] = set()

    def add(self, name: str, gradient: Tensor) -> None:
        self.with_more.add(name)
        super().add(name, gradient)

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0) -> None:
        self.with_more.add(name)
        super().add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, ignored: int | None = None) -> None:
        self.with_rows.add(name)
        super().add_rows(name, indexes, rows, ignored)

    @staticmethod
    def _multiply_half(target: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        # torch has no fake kernel for adding a product to a present sum.
        torch.mm(left, right, out_dtype=target.dtype, out=target)


class CountingError(RuntimeError):
    """The trace failed at counting, not the model at running. Its counts are wrong."""


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts work and the bytes of live storages, and guesses the values that fake tensors do not have.

    Attributes:
        live_nbytes: Bytes of the live storages.
        peak_nbytes: Largest ``live_nbytes`` since its last reset.
        work: Work of the operators since its last reset.
        num_storages: Number of storages made so far.
        new_nbytes: Bytes of live storages made since its last clear, by storage.
        uncounted: Operators without a FLOP formula, and why.
        where: Name of the running unit.
        num_guesses: Number of guessed values.
        on_launch: Called with the tensors of each launch that is not an operator of torch; None without an observer.
        recorder: Called with each operator, and with the work and tensors of such a launch; None without a recorder.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_launch: Callable[[Sequence[Tensor]], None] | None = None
        self.recorder: Recorder | None = None
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self.work = NO_WORK
        self.uncounted: list[str] = []
        self.where = "the model"
        self.num_guesses = 0
        self._guesses: dict[str, list[str]] = {}
        self.new_nbytes: dict[int, int] = {}
        self.num_storages = 0
        self._known: dict[int, tuple[int, int]] = {}  # live storage -> its bytes, and the number of earlier storages
        self._paused = False
        self._values = WeakTensorKeyDictionary()  # fake tensor -> real tensor with its values

    def nbytes_made_before(self, number: int) -> int:
        """Return the bytes of the live storages among the first ``number`` storages."""
        return sum(nbytes for nbytes, made_before in self._known.values() if made_before < number)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of storages made before a tensor's storage; None if it was made elsewhere."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def book(self, work: Work, uncounted: str, tensors: Sequence[Tensor]) -> None:
        """Count work that is not done by operators of torch.

        Args:
            uncounted: Description of uncounted work, or "".
        """
        self.work += work
        if self.on_launch is not None:
            self.on_launch(tensors)
        if self.recorder is not None:
            self.recorder(work, tuple(tensors), {}, None)
        if uncounted and uncounted not in self.uncounted:
            self.uncounted.append(uncounted)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the memory of tensors made inside, which are in blocks."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def know(self, tensor: Tensor, value: Tensor) -> None:
        """Give a fake tensor the values of a real host tensor. Results computed from it are also known."""
        with _disable_current_modes():
            self._values[tensor] = value.clone()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Record guesses under the name of a unit."""
        before, self.where = self.where, name
        try:
            yield
        finally:
            self.where = before

    def guess(self, what: str) -> None:
        """Record a guessed value, and the reason. It is reported once for all units that have it."""
        self.num_guesses += 1
        names = self._guesses.setdefault(what, [])
        if self.where not in names:
            names.append(self.where)

    @property
    def guesses(self) -> tuple[str, ...]:
        """Guessed values, with place and reason, one sentence each."""
        return tuple(
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {what}"
            for what, names in self._guesses.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and not self._values:  # autograd calls it hundreds of times per layer
            return func(*args)
        kwargs = kwargs or {}
        result = self._result_of_known(func, args, kwargs) if self._values else self._result(func, args, kwargs)
        try:
            self._book(func, args, kwargs, result)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise CountingError(f"{func} cannot be accounted for: {type(error).__name__}: {error}") from error
        if self.recorder is not None:
            self.recorder(func, args, kwargs, result)
        return result

    def _result_of_known(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator whose tensors may be known, and store the values of its result."""
        inputs: list[Tensor] = []
        tree_map((args, dict(kwargs)), lambda item: inputs.append(item) if isinstance(item, Tensor) else None)
        unknown = [tensor for tensor in inputs if tensor not in self._values and not _is_real(tensor)]
        if func is torch.ops.aten.index.Tensor and unknown:
            args = (args[0], self._numbered(args[1]), *args[2:])
        if unknown or func in _NOT_REPEATED or any(tensor.numel() > _MOST_KNOWN for tensor in inputs):
            for tensor in changed_arguments(func, args, kwargs):
                self._values.pop(tensor, None)  # type: ignore[no-untyped-call]
            return self._result(func, args, kwargs)
        device = kwargs.get("device") or next((t.device for t in inputs if not _is_real(t)), None)
        with _disable_current_modes():
            real_args, real_kwargs = tree_map((args, dict(kwargs)), self._real)
            value = func(*real_args, **real_kwargs)
        if not _tensors(value):
            return value
        changed = changed_arguments(func, args, kwargs)
        if changed or not _has_dynamic_shape(func):
            result = self._result(func, args, kwargs)
        else:
            result = tree_map(
                value,
                lambda item: (
                    torch.empty(item.shape, dtype=item.dtype, device=device) if isinstance(item, Tensor) else item
                ),
            )
        for fake, real in zip(_tensors(result), _tensors(value), strict=True):
            if not any(fake is tensor for tensor in changed) and real.numel() <= _MOST_KNOWN:
                self._values[fake] = real
        return result

    def _real(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self._values.get(item, item)  # type: ignore[no-untyped-call]
        return torch.device("cpu") if isinstance(item, torch.device) else item

    def _numbered(self, indices: Sequence[Any]) -> list[Any]:
        """Return indices with known masks replaced by the selected numbers, because a mask's count is unknown."""
        found: list[Any] = []
        for index in indices:
            if not isinstance(index, Tensor) or index.dtype != torch.bool or index not in self._values:
                found.append(index)
                continue
            with _disable_current_modes():
                chosen = self._values[index].nonzero().unbind(1)
            for numbers in chosen:
                found.append(torch.empty(numbers.shape, dtype=torch.long, device=index.device))
                self._values[found[-1]] = numbers
        return found

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator: fake tensors, or a guessed number."""
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            if (known := getattr(args[0], "constant", None)) is not None:
                return known.item()
            self.guess("it reads a value that is not known before it runs; taken as 0, or as true")
            if args[0].dtype == torch.bool:
                return True  # validity checks pass
            return 0.0 if args[0].is_floating_point() else 0
        if func is aten.nonzero.default:
            self.guess("the number of nonzero elements is not known before it runs; taken as the longest side")
            found = max(args[0].shape, default=1)
            return torch.zeros(found, args[0].dim(), dtype=torch.long, device=args[0].device)
        if func is aten.rand.default and not args[0]:
            # Layer drop: a layer is skipped if this number is below a rate. The plan is for all layers.
            return torch.tensor(1.0, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # torch's fake kernel accepts only bf16; the real kernel also accepts fp32.
            with self.paused():
                lowered = [arg.to(torch.bfloat16) for arg in args[:2]]
                shape = func(*lowered, *args[2:], **kwargs).shape
            return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **kwargs)

    def _book(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        attention = AttentionCall.of(func, args, kwargs)
        self.work += attention.work if attention is not None else self._work_of(func, args, kwargs, result)
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self._count(item)
        if attention is not None and not self._paused:
            is_deterministic = torch.get_deterministic_debug_mode() == _RAISES
            device = torch.device("cuda") if stands_for_gpu(args[0]) else args[0].device
            hidden = attention.hidden_nbytes(device, is_deterministic=is_deterministic, flash=planned_flash())
            self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + hidden)

    def _work_of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Work:
        """Return the work of a call. If torch's FLOP formula fails, only MFU is lost: the plan continues."""
        flops = 0
        try:
            flops = count_flops(func, args, kwargs, result)
        except Exception as error:
            reason = f"{func}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if reason not in self.uncounted:
                self.uncounted.append(reason)
        if flops:
            return Work(product_flops=flops, launches=1)
        nbytes = moved_nbytes(func, args, kwargs, result)
        return NO_WORK if nbytes is None else Work(moved_nbytes=nbytes, launches=1)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = 0 if self._paused else storage.nbytes()
        self._known[key] = nbytes, self.num_storages
        self.new_nbytes[key] = nbytes
        self.num_storages += 1
        weakref.finalize(storage, self._forget, key)
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)

    def _forget(self, key: int) -> None:
        self.live_nbytes -= self._known.pop(key)[0]
        self.new_nbytes.pop(key, None)


#: Largest number of elements of a tensor whose values the trace computes.
_MOST_KNOWN = 1 << 25
#: Operators whose known values would differ from a run's, or are of no use.
_NOT_REPEATED = frozenset(
    {torch.ops.aten.rand.default, torch.ops.aten.randn.default, torch.ops.aten.empty.memory_format}
)


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has real values, like constants in the model's code, even in a trace."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(value, lambda item: found.append(item) if isinstance(item, Tensor) else None)
    return found


def _has_dynamic_shape(func: Any) -> bool:
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(getattr(func, "tags", ())))


_NO_FLOPS = 0


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of one optimizer step; 0 if the trace does not know all FLOPs.

    Matrix products, convolutions and attention are counted, with two FLOPs for each multiplication and addition. Causal
    attention counts in full, as kernels are rated. The optimizer does not count.

    Attributes:
        model: FLOPs of one forward and one backward of the tokens that are not padding.
        hardware: All executed FLOPs, with recomputed forwards and padding.
    """

    model: int = _NO_FLOPS
    hardware: int = _NO_FLOPS


def is_counted(trace: VisitTrace) -> bool:
    """Return whether a trace knows the FLOPs of everything that it ran."""
    return trace.exact and not trace.uncounted and bool(trace.num_tokens)


def step_flops(
    trace: VisitTrace,
    *,
    num_places: int,
    num_real_tokens: int,
    num_trained_tokens: int,
    recompute: Recompute = KEEP_NOTHING,
) -> StepFlops:
    """Return the FLOPs of a step, scaled from the traced micro-batch.

    Layers cost the same for each position of a row, the head for each trained token. Attention counts as in rows of the
    traced length, which is too much if rows are shorter.

    Args:
        num_places: Tokens of all micro-batches, with padding.
        num_real_tokens: Tokens without padding.
        num_trained_tokens: Tokens with a label.
        recompute: Forward results kept for the backward. For a loss that compares rows, it keeps no logits.
    """
    if not is_counted(trace):
        return StepFlops()
    trunk = [visit for visit in trace.visits if not visit.is_head]
    forward = sum(visit.forward.flops for visit in trunk)
    backward = sum(visit.backward.flops for visit in trunk)
    recomputed = sum(visit.recompute.flops for visit in trunk)
    saved = sum(visit.recompute.flops for number, visit in enumerate(trace.visits) if number in recompute.kept_graphs)
    saved += sum(recompute.savable(number, visit).work.flops for number, visit in enumerate(trace.visits))
    head = trace.head.flops * num_trained_tokens
    again = max(0, trace.head_parts - recompute.kept_parts)
    logits = trace.logits_flops * num_trained_tokens * again // trace.head_parts
    return StepFlops(
        model=((forward + backward - recomputed) * num_real_tokens + head) // trace.num_tokens,
        hardware=((forward + backward - saved) * num_places + head + logits) // trace.num_tokens,
    )


def count_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of one call of a torch operator."""
    if (attention := AttentionCall.of(func, args, kwargs)) is not None:
        return attention.num_flops
    formula = _formulas().get(getattr(func, "_overloadpacket", None))
    return _NO_FLOPS if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Return operator -> formula: torch's formulas, and additional ones."""
    from torch.utils import flop_counter

    counter: Any = flop_counter  # its functions carry no types

    return {**counter.flop_registry, torch.ops.aten._grouped_mm: _grouped_mm}


def _grouped_mm(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of groups of rows [M, K] times one matrix each [E, K, N], or of their backward."""
    rows, inner = a.shape[-2:]
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return int(2 * groups * rows * inner * b.shape[-1])
