"""Weight gradients that are added to fp32 accumulators as soon as they are computed.

Autograd returns a weight's gradient as a separate tensor with the shape and dtype of the weight. An embedding's
gradient has all rows, although a step needs few of them. To avoid this temporary tensor, the leaves bound to a unit's
matrices intercept `F.linear`, `F.embedding` and `torch.addmm`. In the backward, an intercepted matmul adds its product
to the accumulator, and an embedding adds the rows of the batch's tokens. Autograd gets no gradient for the weight. If
the device supports it, half-precision products are summed in fp32 within the GEMM.

All other operations on a weight (slices, transposes, casts, stacked experts) use autograd as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatrain.base.layout import SplitTensor
from megatrain.engine.device import device_kernels
from megatrain.engine.device.device_kernels import has_sync_reads
from megatrain.engine.program.block_access import GradientSink
from megatrain.ranks.lanes import Lanes, Subtree

#: Maximum bytes of temporary memory for a product that the GEMM cannot add to the sum, or for rows that are cast.
_TEMPORARY_NBYTES = 16 << 20


class GradientAccumulator(GradientSink):
    """fp32 accumulators of a visit. A parameter's first gradient is copied, and all later gradients are added.

    Args:
        targets: View of each parameter's accumulator, by name.
        added_names: Parameters that already have a gradient. This set is extended in place.
        is_zeroed: Whether to add a parameter's first product to zeros instead of copying it.
    """

    def __init__(
        self, targets: Mapping[str, Tensor | SplitTensor], added_names: set[str], *, is_zeroed: bool = False
    ) -> None:
        self._targets = targets
        self._added_names = added_names
        self._is_zeroed = is_zeroed

    @property
    def added_names(self) -> frozenset[str]:
        """Names of the parameters that have a gradient."""
        return frozenset(self._added_names)

    def set_micro_batch(self, micro_batch: int) -> None:
        """Do nothing, because all micro-batches share one sum."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter, in any float dtype."""
        if name in self._added_names:
            self._targets[name].add_(gradient)
        else:
            self._targets[name].copy_(gradient)
            self._added_names.add(name)

    def merge(self, source: GradientAccumulator) -> None:
        """Add the sums of another accumulator, and clear the other accumulator."""
        for name in source._added_names:
            for (target, _, _), (addend, _, _) in zip(
                _pieces(self._targets[name]), _pieces(source._targets[name]), strict=True
            ):
                if name in self._added_names:
                    target.add_(addend)
                else:
                    target.copy_(addend)
        self._added_names |= source._added_names
        source._added_names.clear()

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0) -> None:
        """Add ``left`` [M, K] @ ``right`` [K, N] to the M rows of a matrix that start at ``first_row``."""
        product_rows = range(first_row, first_row + len(left))
        if len(product_rows) == _num_rows(self._targets[name]) and not self._is_zeroed:
            is_first = name not in self._added_names
            self._added_names.add(name)
        else:
            self._zero_if_new(name)
            is_first = False
        for memory, rows, columns in _pieces(self._targets[name], product_rows):
            start, stop = max(rows.start, product_rows.start), min(rows.stop, product_rows.stop)
            target = memory[start - rows.start : stop - rows.start]
            self._add_matmul(target, left[start - first_row : stop - first_row], right[:, columns], is_first=is_first)

    def _add_matmul(self, target: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        if left.dtype == target.dtype:
            self._multiply(target, left, right, is_first=is_first)
        elif target.is_cuda or device_kernels.is_gpu_stand_in(target):
            self._multiply_half(target, left, right, is_first=is_first)
        else:
            _multiply_chunked(target, left, right, is_first=is_first)

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, padding_idx: int | None = None) -> None:
        """Add ``rows`` [K, N] in order to rows ``indexes`` [K] of a matrix. Row ``padding_idx`` gets no gradient."""
        self._zero_if_new(name)
        for memory, row_range, columns in _pieces(self._targets[name]):
            if device_kernels.are_usable(memory):
                device_kernels.add_rows(memory, row_range, rows[:, columns], _row_groups(indexes), padding_idx)
            else:
                _add_rows_chunked(memory, row_range, indexes, rows[:, columns], padding_idx)

    def _zero_if_new(self, name: str) -> None:
        """Zero a parameter's accumulator if the parameter has no gradient yet."""
        if name not in self._added_names:
            for memory, _, _ in _pieces(self._targets[name]):
                memory.zero_()
            self._added_names.add(name)

    @staticmethod
    def _multiply(target: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        if is_first:
            torch.mm(left, right, out=target)
        else:
            torch.addmm(target, left, right, out=target)

    @staticmethod
    def _multiply_half(target: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        """Multiply half-precision matrices, with all additions in fp32."""
        if is_first:
            torch.mm(left, right, out_dtype=target.dtype, out=target)
        else:
            torch.addmm(target, left, right, out_dtype=target.dtype, out=target)


class LaneAccumulator:
    """Accumulators of a use site, or of some rows of a matrix, with one sum per lane.

    When a lane is complete, open sums are added in the order of the tree of lanes (``ranks/lanes.py``). The first open
    sum uses the gradient's own memory. Memory for each further open sum is allocated when its first gradient arrives.

    Args:
        first_sum: Accumulators of the first open sum.
        create: Function that creates accumulators for the same parameters with separate memory.
    """

    def __init__(self, lanes: Lanes, first_sum: GradientAccumulator, create: Callable[[], GradientAccumulator]) -> None:
        self._lanes, self._create = lanes, create
        self._accumulators = [first_sum]
        self._num_open = 1
        self._lane = lanes.local_lanes.start

    def set_micro_batch(self, micro_batch: int) -> None:
        """Advance to a micro-batch, by its number within these lanes. Call this for the micro-batches in order."""
        lane = self._lanes.lane_of(micro_batch)
        assert self._lane <= lane < self._lanes.local_lanes.stop, (micro_batch, self._lane, lane, self._lanes)
        while self._lane < lane:
            self._close_lane()
            self._num_open += 1

    def close(self) -> list[tuple[Subtree, GradientAccumulator | None]]:
        """Close the remaining lanes and return the open sums.

        Returns:
            The nodes of the tree that remain open, with their sums. A process that has all lanes of the step has one
            node. A sum is None if it has no gradients.
        """
        while self._lane < self._lanes.local_lanes.stop - 1:
            self._close_lane()
            self._num_open += 1
        self._close_lane()
        nodes = self._lanes.subtrees
        assert len(nodes) == self._num_open, (nodes, self._num_open)
        open_sums = [*self._accumulators[: self._num_open], *[None] * (self._num_open - len(self._accumulators))]
        self._accumulators = self._accumulators[:1]
        return list(zip(nodes, open_sums, strict=True))

    def _close_lane(self) -> None:
        for _ in range(self._lanes.num_merges(self._lane)):
            self._num_open -= 1
            if self._num_open < len(self._accumulators):
                self._accumulators[self._num_open - 1].merge(self._accumulators[self._num_open])
        self._lane += 1

    @property
    def _current(self) -> GradientAccumulator:
        while len(self._accumulators) < self._num_open:
            self._accumulators.append(self._create())
        return self._accumulators[self._num_open - 1]

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the current micro-batch's gradient of a parameter."""
        self._current.add(name, gradient)

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0) -> None:
        """Add a product to rows of a matrix's gradient."""
        self._current.add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, padding_idx: int | None = None) -> None:
        """Add rows to a matrix's gradient."""
        self._current.add_rows(name, indexes, rows, padding_idx)


def _num_rows(target: Tensor | SplitTensor) -> int:
    return len(target) if isinstance(target, Tensor) else target.piece_views[-1][0].rows.stop


def _pieces(target: Tensor | SplitTensor, selection: range | None = None) -> Iterator[tuple[Tensor, range, slice]]:
    """Yield each piece of a matrix as memory [rows, columns], row range and column slice.

    Args:
        target: Matrix in one or several blocks.
        selection: Rows of interest. Pieces without any of these rows are skipped. None for all rows.
    """
    if isinstance(target, Tensor):
        yield target, range(len(target)), slice(None)
        return
    for piece, memory in target.piece_views:
        if selection is None or max(piece.rows.start, selection.start) < min(piece.rows.stop, selection.stop):
            columns = slice(None) if piece.columns is None else slice(piece.columns.start, piece.columns.stop)
            yield memory.view(len(piece.rows), -1), piece.rows, columns


def _row_groups(indexes: Tensor) -> Tensor:
    """Return ``row_groups(indexes)``, which is computed only once for all parts of a matrix."""
    groups: Tensor | None = getattr(indexes, _GROUPS, None)
    if groups is None:
        groups = device_kernels.row_groups(indexes)
        setattr(indexes, _GROUPS, groups)
    return groups


def _add_rows_chunked(target: Tensor, row_range: range, indexes: Tensor, rows: Tensor, padding_idx: int | None) -> None:
    """Add the rows that belong to this part, in order, a limited number at a time."""
    step = max(1, _TEMPORARY_NBYTES // (4 * rows.shape[-1]))
    for start in range(0, len(rows), step):
        ids, values = indexes[start : start + step], rows[start : start + step]
        is_in_range = (ids >= row_range.start) & (ids < row_range.stop)
        if padding_idx is not None:
            is_in_range &= ids != padding_idx
        if not has_sync_reads(ids.device) and not isinstance(ids, FakeTensor):
            hits = is_in_range.nonzero().squeeze(1)
            target.index_add_(0, ids[hits].sub_(row_range.start), values.index_select(0, hits).to(target.dtype))
            continue
        # Mask the rows instead of selecting them, because the host does not know the indexes. Masked rows add zeros to
        # different rows, because a GPU serializes additions to the same row.
        spread_rows = torch.arange(len(ids), device=ids.device).remainder_(len(row_range))
        values = values.to(target.dtype).masked_fill(is_in_range.logical_not().unsqueeze(-1), 0.0)
        target.index_add_(0, torch.where(is_in_range, ids - row_range.start, spread_rows), values)


def _multiply_chunked(target: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add a product to a sum with a different dtype, a few rows at a time, because no GEMM supports both dtypes."""
    step = max(1, _TEMPORARY_NBYTES // (right.shape[-1] * right.element_size()))
    for start in range(0, len(left), step):
        rows = slice(start, start + step)
        product = torch.mm(left[rows], right)
        if is_first:
            target[rows].copy_(product)
        else:
            target[rows].add_(product)


class GradientReceiver:
    """Receiver that passes weight gradients of one unit to the sink of the running backward.

    Graphs refer to the receiver, because the sink exists only during the backward.
    """

    def __init__(self) -> None:
        self._sink: GradientSink | None = None

    @property
    def sink(self) -> GradientSink:
        """Sink of the running backward."""
        assert self._sink is not None, "a weight got a gradient outside of the backward of its unit"
        return self._sink

    @contextmanager
    def use_sink(self, sink: GradientSink | None) -> Iterator[None]:
        """Pass gradients to a sink within the context."""
        previous, self._sink = self._sink, sink
        try:
            yield
        finally:
            self._sink = previous


@dataclass(frozen=True, slots=True)
class GradientTarget:
    """Position in a parameter's accumulator to which a leaf's gradient is added: rows that start at ``first_row``."""

    receiver: GradientReceiver
    name: str
    first_row: int = 0


_TARGET = "_megatrain_gradient_target"
_GROUPS = "_megatrain_row_groups"


def weight_leaf(values: Tensor, target: GradientTarget) -> Tensor:
    """Return a leaf that shares the memory of ``values`` [M, N]. Intercepted functions send its gradient to the target.

    Code that uses the leaf must run within ``intercept_leaves``.
    """
    leaf = values.detach()
    if type(leaf) is Tensor:
        leaf = Tensor._make_subclass(_WeightLeaf, leaf)
    leaf.requires_grad_()
    setattr(leaf, _TARGET, target)
    return leaf


def new_leaf(weight: Tensor, *, requires_grad: bool) -> Tensor:
    """Return a new leaf that shares the memory and the target of a weight."""
    target = gradient_target(weight)
    if target is None or not requires_grad:
        return weight.detach().requires_grad_(requires_grad)
    return weight_leaf(weight, target)


def gradient_target(leaf: Tensor) -> GradientTarget | None:
    """Return the target of a leaf, or None for other tensors."""
    target: GradientTarget | None = getattr(leaf, _TARGET, None)
    return target


class _WeightLeaf(Tensor):
    """Leaf that intercepts the torch functions to which it is passed."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call_intercepted(func, args, kwargs or {})


class _Interception(TorchFunctionMode):
    """Mode that intercepts torch functions for leaves of another tensor subclass (fake tensors)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call_intercepted(func, args, kwargs or {})


def intercept_leaves(leaves: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which torch functions that are called with these leaves are intercepted."""
    needs_mode = any(gradient_target(leaf) is not None and not isinstance(leaf, _WeightLeaf) for leaf in leaves)
    return _Interception() if needs_mode else nullcontext()


def _call_intercepted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    substitute = _SUBSTITUTES.get(func)
    # Without a graph, no gradient is needed. Under autocast, substitutes return None, and autograd takes over.
    if substitute is not None and torch.is_grad_enabled():
        result = substitute(*args, **kwargs)
        if result is not None:
            return result
    return func(*args, **kwargs)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute `F.linear`. The backward adds the weight's gradient to its target. Return None if that is unsupported."""
    target = gradient_target(weight)
    if target is None or torch.is_autocast_enabled(rows.device.type) or rows.dtype != weight.dtype:
        return None
    # Flatten and unflatten here, because autograd forbids in-place changes to views created in `_Linear`.
    flat = rows.reshape(-1, rows.shape[-1])
    out: Tensor = _Linear.apply(flat, weight, bias, target)  # type: ignore[no-untyped-call]
    return out.view(*rows.shape[:-1], out.shape[-1])


def _addmm(bias: Tensor, rows: Tensor, weight: Tensor, **options: Any) -> Tensor | None:
    """Compute `torch.addmm` like ``linear``. The weight is [in, out], as in transformers' ``Conv1D``."""
    target = gradient_target(weight)
    if target is None or options or torch.is_autocast_enabled(rows.device.type) or bias.dim() != 1:
        return None
    out: Tensor = _Addmm.apply(bias, rows, weight, target)  # type: ignore[no-untyped-call]
    return out


def _embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    target = gradient_target(weight)
    if target is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    out: Tensor = _Embedding.apply(ids, weight, padding_idx, target, [])  # type: ignore[no-untyped-call]
    return out


def embed_rows(ids: Tensor, rows: Tensor, leaf: Tensor, padding_idx: int | None, target: GradientTarget) -> Tensor:
    """Return rows that were looked up earlier, as if `F.embedding` had just looked them up.

    Args:
        ids: Indexes of the rows, of any shape.
        leaf: Placeholder that represents the matrix in the graph. Autograd gives it no gradient.
        padding_idx: Index of the row that gets no gradient.
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(leaf)
    out: Tensor = _Embedding.apply(ids, leaf, padding_idx, target, [rows])  # type: ignore[no-untyped-call]
    return out


_SUBSTITUTES: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    functional.linear: linear,
    functional.embedding: _embedding,
    torch.addmm: _addmm,
}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: GradientTarget) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(rows, weight)
        return functional.linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        target: GradientTarget = ctx.target
        target.receiver.sink.add_product(target.name, grad.t(), rows, target.first_row)
        grad_rows = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_rows, None, grad_bias, None


class _Addmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, rows: Tensor, weight: Tensor, target: GradientTarget) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(rows, weight)
        return torch.addmm(bias, rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        target: GradientTarget = ctx.target
        target.receiver.sink.add_product(target.name, rows.t(), grad, target.first_row)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[0] else None
        grad_rows = torch.mm(grad, weight.t()) if ctx.needs_input_grad[1] else None
        return grad_bias, grad_rows, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, target: GradientTarget, rows: Sequence[Tensor]
    ) -> Tensor:
        ctx.target, ctx.padding_idx = target, padding_idx
        ctx.save_for_backward(ids)
        return rows[0] if rows else functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        target: GradientTarget = ctx.target
        rows = grad.reshape(-1, grad.shape[-1])
        target.receiver.sink.add_rows(target.name, ids.reshape(-1), rows, ctx.padding_idx)
        return (None, None, None, None, None)
