"""Running one forward and backward without memory, to learn what a step will need.

The engine itself runs, on fake tensors: shapes and dtypes are real, storages are not. Where a model looks at values
(a mixture of experts that loops over the experts that were hit), the values are made up and the trace says that its
byte counts are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatrain.engine.arguments import tree_map
from megatrain.engine.trace_ledger import Ledger, LedgerError
from megatrain.models.errors import UnsupportedModelError
from megatrain.models.kept import reads_more_than_text
from megatrain.models.skeleton import rows_are_documents
from tiered.units import round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedModel

    from megatrain.engine.objective import Objective
    from megatrain.engine.runner import LayerRunner
    from megatrain.engine.units import BoundUnit
    from megatrain.models.graph import ModelGraph, Unit

__all__ = ["TracedVisit", "VisitTrace", "trace_visits"]

#: Allocators give memory in units of so many bytes.
_ALIGNMENT_BYTES = 512

_TRACED_PIECES = 3  # of the head: the first, which begins the gradient, and others, which add to it
_LOSS_NBYTES = 4  # what is left of a piece until the end of the step


@dataclass(frozen=True, slots=True)
class TracedVisit:
    """One unit call of a forward; byte counts are those of one micro-batch, on the compute device.

    Attributes:
        unit: Index of the unit.
        is_head: Whether it runs in the head phase, piece by piece.
        has_backward: Whether the backward runs the unit again. False where nothing that is trained comes before its
            output, and where the loss does not depend on it: announced, but no weights are asked for.
        saved: `(shape, dtype)` of every activation that is put away for the backward.
        held_nbytes: Live besides weights and gradient accumulators when the visit begins: the stream of activations,
            masks, tables. In layer order every micro-batch holds this much, and as much again of the next visit's.
        forward_nbytes: Peak on top of that while the unit runs (and the model's own code up to the next visit).
        backward_nbytes: Peak of recompute and backward on top of what is held, gradients of the parameters included.
        forward_flops: Floating-point operations of the forward.
        backward_flops: Those of recompute and backward. Both are 0 for visits of the head.
        graph_nbytes: What the graph of the forward holds if it is kept for the backward: all that autograd saves, the
            inputs, and weights cast to other dtypes; not the weights themselves, nor what visits share.
    """

    unit: int
    is_head: bool
    has_backward: bool
    saved: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    held_nbytes: int
    forward_nbytes: int
    backward_nbytes: int
    forward_flops: int = 0
    backward_flops: int = 0
    graph_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class VisitTrace:
    """The visits of one forward in order, the head's last.

    Attributes:
        visits: All visits.
        shared_nbytes: What one micro-batch keeps by reference from forward to backward: masks, rotary tables, ids.
        head_nbytes: Peak of the head phase of one micro-batch on top of what is held: one piece of logits with its
            gradients, and the gradient of the trunk's output.
        head_rows: Rows of logits at a time; 0 if the head is not chunked.
        guesses: What had to be made up, where and why, a sentence each: counts are estimates then.
        uncounted: Operators whose FLOPs nobody knows, and why; byte counts do not depend on it.
        head_flops: Floating-point operations of the head phase, forward and backward, with a label for every token.
        num_tokens: Tokens of the micro-batch.
    """

    visits: tuple[TracedVisit, ...]
    shared_nbytes: int
    head_nbytes: int
    head_rows: int
    guesses: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    head_flops: int = 0
    num_tokens: int = 0

    @property
    def exact(self) -> bool:
        """Whether byte counts are those of the model, and not estimates."""
        return not self.guesses


def trace_visits(
    graph: ModelGraph,
    batch_size: int,
    seq_len: int,
    compute_dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    head_rows: int | None = None,
    objective: Objective | None = None,
    padded: bool = True,
) -> VisitTrace:
    """Learn the visits of a micro-batch of `batch_size` x `seq_len` tokens; all of them have a label.

    Args:
        graph: The model; it stays as it is, and nothing is put on `device`.
        batch_size: Rows of the micro-batch.
        seq_len: Tokens per row.
        compute_dtype: Must be the graph's.
        device: Compute device; kernels, and so workspaces, differ between devices.
        head_rows: As for the runner.
        objective: As for the runner.
        padded: Whether the attention mask tells of padding or documents. If not, each row is one document.

    Raises:
        UnsupportedModelError: the model cannot be streamed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatrain.engine.runner import LayerRunner

    device = _numbered(torch.device(device))
    access = _TraceAccess(graph, compute_dtype, device)
    num_tokens = batch_size * seq_len
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_buffers(graph.model, device, fake):
        runner = LayerRunner(
            graph,
            access,
            device=device,
            compute_dtype=compute_dtype,
            head_rows=head_rows,
            objective=objective,
            random_enabled=False,
        )
        access.runner = runner
        for bound in runner.bounds:
            bound.forward = _measured(_guessing(bound, access.ledger), access)
        with fake, access.ledger:
            with access.ledger.paused():
                ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
                batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
                num_rows = min(num_tokens, _TRACED_PIECES * runner.head_rows) or num_tokens  # all pieces are alike
                rows = torch.zeros(num_rows, dtype=torch.long, device=device)
            with nullcontext() if padded else rows_are_documents(), _texts_explained(graph.model):
                runner.run_pass({0: batch}, {0: (rows, rows)}, num_tokens, 0)
            access.close()
    return _with_all_pieces(access.trace(), num_rows, num_tokens)


def _numbered(device: torch.device) -> torch.device:
    """Return the device with its number, which fake tensors and their operators must not ask a driver for."""
    if device != torch.device("cuda"):  # which has none
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


@contextmanager
def _fake_buffers(model: nn.Module, device: torch.device, fake: FakeTensorMode) -> Iterator[None]:
    """Have a model's buffers on the compute device for a time, without memory there."""
    from megatrain.engine.runner import move_buffers

    before = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        with fake:
            move_buffers(model, device)
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


@contextmanager
def _texts_explained(model: PreTrainedModel) -> Iterator[None]:
    """Say it plainly if a model that reads images as well does not run on a text without any."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # the code of every family raises its own kinds
        if not reads_more_than_text(model):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModelError(
            type(model).__name__,
            f"only text can be trained, and its forward does not run on text alone ({reason}). Take a text model",
        ) from error


def _with_all_pieces(trace: VisitTrace, num_rows: int, num_tokens: int) -> VisitTrace:
    """Return the trace of a head of ``num_tokens`` rows, given that of its first ``num_rows``."""
    nbytes = _LOSS_NBYTES * -(-(num_tokens - num_rows) // (trace.head_rows or num_tokens))
    visits = tuple(
        replace(visit, forward_nbytes=visit.forward_nbytes + nbytes, backward_nbytes=visit.backward_nbytes + nbytes)
        if visit.is_head
        else visit
        for visit in trace.visits
    )
    return replace(
        trace,
        visits=visits,
        num_tokens=num_tokens,
        head_nbytes=trace.head_nbytes + nbytes,
        head_flops=trace.head_flops * num_tokens // num_rows,
    )


def _guessing(bound: BoundUnit, ledger: Ledger) -> Callable[..., Any]:
    """Return the unit's forward; where made-up values break a layer, its output is taken to be like its input.

    The gradients of its parameters are counted all the same; what it computes inside is not.
    """
    forward = bound.forward

    def guess(*args: Any, **kwargs: Any) -> Any:
        with ledger.inside(bound.unit.name):
            return run(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (UnsupportedModelError, LedgerError):
            raise
        except Exception as error:
            stream = args[0] if args else kwargs.get("hidden_states")
            if not bound.unit.is_layer or not isinstance(stream, Tensor):
                raise
            ledger.guess(
                f"its forward failed on tensors without numbers ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}); planned as if its output were like its input, without what it "
                "takes inside"
            )
            return stream + sum(parameter.sum() * 0 for parameter in bound.unit.module.parameters())

    return guess


def _measured(forward: Callable[..., Any], access: _TraceAccess) -> Callable[..., Any]:
    """Return a unit's forward that tells how much the graph holds which a recompute builds."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        if not access.is_in_backward:
            return forward(*args, **kwargs)
        saved: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            saved.add(tensor.untyped_storage()._cdata)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = forward(*args, **kwargs)
        access.note_graph(value, saved)
        return value

    return measured


@dataclass(slots=True)
class _Phase:
    name: str
    visit: int
    held_nbytes: int
    peak_nbytes: int
    num_flops: int = 0


class _TraceAccess:
    """`BlockAccess` that gives fake weights, keeps shapes, and reads the ledger at every announcement."""

    def __init__(self, graph: ModelGraph, dtype: torch.dtype, device: torch.device) -> None:
        self.ledger = Ledger()
        self.runner: LayerRunner | None = None
        self._shapes = {entry.name: entry.shape for layout in graph.layouts.values() for entry in layout.entries}
        self._dtype, self._device = dtype, device
        self._phases: list[_Phase] = []
        self._saved: dict[int, list[Tensor]] = {}
        self._units: list[int] = []
        self._with_backward: set[int] = set()
        self._graph_nbytes: dict[int, int] = {}
        self._shared_nbytes = 0

    def begin(self, phase: Literal["forward", "head", "backward"], visit: int) -> None:
        self.close()
        if phase != "forward" and not any(earlier.name != "forward" for earlier in self._phases):
            self._note_visits()
        self.ledger.peak_nbytes, self.ledger.num_flops = self.ledger.live_nbytes, 0
        self.ledger.new_nbytes.clear()
        self._phases.append(_Phase(phase, visit, self.ledger.live_nbytes, 0))

    def close(self) -> None:
        """Read the peak and the FLOPs of the phase that ends."""
        if self._phases:
            self._phases[-1].peak_nbytes = self.ledger.peak_nbytes - self._phases[-1].held_nbytes
            self._phases[-1].num_flops = self.ledger.num_flops

    def _note_visits(self) -> None:
        assert self.runner is not None
        self._units = [visit.bound.unit.index for visit in self.runner.visits] + list(self.runner.head_units)
        shared = {id(t.untyped_storage()): t for visit in self.runner.visits for t in visit.shared_tensors()}
        by_storage = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in shared.values()}
        self._shared_nbytes = sum(by_storage.values())

    @property
    def is_in_backward(self) -> bool:
        """Whether the backward of a visit is under way."""
        return bool(self._phases) and self._phases[-1].name == "backward"

    def note_graph(self, value: Any, saved: set[int]) -> None:
        """Note what is alive of all that a visit made since its backward began: its graph, and what it returned.

        Args:
            value: What it returned. The rest of the model holds that, the graph only what it saved of it.
            saved: Storages that autograd saved.
        """
        alive = dict(self.ledger.new_nbytes)

        def forget(leaf: Any) -> None:
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in saved:
                alive.pop(key, None)

        tree_map(value, forget)
        visit = self._phases[-1].visit
        inputs = sum(tensor.untyped_storage().nbytes() for tensor in self._saved.get(visit, ()))
        self._graph_nbytes[visit] = inputs + sum(round_up(nbytes, _ALIGNMENT_BYTES) for nbytes in alive.values())

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, Tensor]]:
        if self._phases[-1].name != "forward":
            self._with_backward.add(visit)
        with self.ledger.paused():
            tensors = {
                owner: torch.empty(self._shapes[owner], dtype=self._dtype, device=self._device)
                for _, owner, _ in unit.params
            }
        yield tensors

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[_NoSink]:
        yield _NoSink()

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        with self.ledger.paused():
            self._saved.setdefault(visit, []).append(tensor.clone())
        assert index == len(self._saved[visit]) - 1, (visit, index)

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[Tensor]:
        yield self._saved[visit][index]

    def trace(self) -> VisitTrace:
        """Put together what was seen."""
        assert self.runner is not None
        phases = {(phase.name, phase.visit): phase for phase in self._phases}
        num_head = len(self.runner.head_units)
        first_head = len(self._units) - num_head
        visits: list[TracedVisit] = []
        for number, unit in enumerate(self._units):
            is_head = number >= first_head
            forward = phases.get(("forward", number)) or phases["head", first_head]
            backward = phases.get(("backward", number)) or phases["head", first_head]
            saved = tuple((tuple(t.shape), t.dtype) for t in self._saved.get(number, ()))
            again = number in self._with_backward
            peaks = (forward.peak_nbytes, backward.peak_nbytes)
            flops = (0, 0) if is_head else (forward.num_flops, backward.num_flops)
            graph_nbytes = self._graph_nbytes.get(number, 0)
            visits.append(TracedVisit(unit, is_head, again, saved, forward.held_nbytes, *peaks, *flops, graph_nbytes))
        head = phases["head", first_head] if num_head else _Phase("head", first_head, 0, 0)
        return VisitTrace(
            visits=tuple(visits),
            shared_nbytes=self._shared_nbytes,
            head_nbytes=head.peak_nbytes,
            head_rows=self.runner.head_rows,
            guesses=self.ledger.guesses,
            uncounted=tuple(self.ledger.uncounted),
            head_flops=head.num_flops,
        )


class _NoSink:
    """Gradients of a trace go nowhere."""

    def add(self, name: str, gradient: Tensor, /) -> None:
        """Let go of it."""
