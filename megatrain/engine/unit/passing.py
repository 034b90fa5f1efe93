"""Weights whose parts are leased one at a time, so that the whole matrix is never in memory.

`F.embedding` looks up rows in the parts of a weight. Each part must be leased only once, so the rows of all
micro-batches are looked up before the first micro-batch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.device import device_kernels
from megatrain.engine.unit.absent_weights import AbsentWeight
from megatrain.engine.unit.weight_gradients import GradientTarget, embed_rows

if TYPE_CHECKING:
    from megatrain.engine.program.block_access import MatrixParts
    from megatrain.engine.unit.suspend import UnitCall


class RowLookUps:
    """Early look-up of the rows that a unit's runs need from weights that are leased by part.

    Attributes:
        call_index: Position of the current run among the calls passed to ``look_up``.
    """

    def __init__(self) -> None:
        self._weights: list[SplitWeight] = []
        self.call_index = 0

    @contextmanager
    def bind(self, leaves: Iterable[Tensor]) -> Iterator[None]:
        """Within the context, look up rows in the bound weights whose parts are leased one at a time."""
        self._weights = [leaf for leaf in leaves if isinstance(leaf, SplitWeight) and leaf.parts.is_passing]
        try:
            yield
        finally:
            self._weights = []

    def look_up(self, calls: Sequence[UnitCall], start_run: Callable[[UnitCall], Any]) -> list[list[Tensor]]:
        """Look up the rows that calls of the unit will need, leasing each part once.

        Args:
            start_run: Function that starts running a call. The run is aborted when it looks up rows.

        Returns:
            Row indexes, by weight and call.
        """
        row_indexes: list[list[Tensor]] = []
        for weight in self._weights:
            row_indexes.append([])
            for call in calls:
                try:
                    start_run(call)
                except _RowsNeeded as signal:
                    row_indexes[-1].append(signal.indexes)
            assert len(row_indexes[-1]) == len(calls), "a unit does not look up rows of a weight whose parts pass"
            weight.look_up(row_indexes[-1])
        return row_indexes

    def look_up_again(self, row_indexes: Sequence[Sequence[Tensor]]) -> None:
        """Look up the same rows again for the recompute.

        Args:
            row_indexes: Row indexes that ``look_up`` returned.
        """
        for weight, indexes in zip(self._weights, row_indexes, strict=True):
            weight.look_up(indexes)


def lease_passing_parts(weights: Mapping[str, Tensor | MatrixParts]) -> None:
    """Lease each part of weights that are leased by part, without using it, because the tape contains these leases."""
    for weight in weights.values():
        if not isinstance(weight, Tensor) and weight.is_passing:
            for index in range(len(weight.rows)):
                with weight.part(index):
                    pass


class SplitWeight(AbsentWeight):
    """Placeholder for a matrix whose rows are stored in several blocks. Can be used only in `F.embedding`.

    If all blocks are leased together, `F.embedding` looks up the rows. If blocks are leased one at a time,
    ``RowLookUps`` has looked up the rows of all micro-batches beforehand.

    Attributes:
        target: Receiver of the gradient; None if the weight is not trained.
    """

    parts: MatrixParts
    target: GradientTarget | None
    _look_ups: RowLookUps
    _rows: list[Tensor | None]

    @classmethod
    def from_placeholder(
        cls, placeholder: AbsentWeight, parts: MatrixParts, target: GradientTarget | None, look_ups: RowLookUps
    ) -> SplitWeight:
        """Return a ``SplitWeight`` with the shape of ``placeholder``. It requires a gradient if there is a target."""
        weight: Any = Tensor._make_subclass(cls, placeholder, target is not None)
        weight.parts, weight.target, weight._look_ups, weight._rows = parts, target, look_ups, []
        assert isinstance(weight, SplitWeight)
        return weight

    def look_up(self, row_indexes: Sequence[Tensor]) -> None:
        """Look up and keep the rows of each micro-batch."""
        self._rows = list(_look_up_in_parts(self, row_indexes))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.embedding:
            with torch._C.DisableTorchFunctionSubclass():
                return _embed_from_parts(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class _RowsNeeded(BaseException):
    """Signal that aborts a unit's forward at its look-up. Not an `Exception`, so model code does not catch it."""

    def __init__(self, weight: SplitWeight, indexes: Tensor) -> None:
        self.weight, self.indexes = weight, indexes
        super().__init__()


def _embed_from_parts(indexes: Tensor, weight: SplitWeight, padding_idx: int | None = None, **_: Any) -> Tensor:
    """Compute `F.embedding`. The trace has ruled out options that change the weight or scale its gradient."""
    rows: Tensor | None
    if weight.parts.is_passing:
        if not weight._rows:
            raise _RowsNeeded(weight, indexes)
        call_index = weight._look_ups.call_index
        rows, weight._rows[call_index] = weight._rows[call_index], None  # dropped: the model can change them in place
        assert rows is not None and rows.shape[:-1] == indexes.shape, "a second look-up of rows in one run"
    else:
        (rows,) = _look_up_in_parts(weight, [indexes])
    if weight.target is None or not torch.is_grad_enabled():
        return rows
    return embed_rows(indexes, rows, weight, padding_idx, weight.target)


#: Bytes of temporary memory that a look-up on a device uses in addition to its result.
_LOOK_UP_NBYTES = 16 << 20


def _look_up_in_parts(weight: SplitWeight, row_indexes: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of a matrix for several index tensors, leasing each part once."""
    width, parts = weight.parts.shape[1], weight.parts
    outputs = [torch.full((*ids.shape, width), torch.nan, dtype=weight.dtype, device=ids.device) for ids in row_indexes]
    num_found = 0
    for index, row_range in enumerate(parts.rows):
        with parts.part(index) as rows:
            for indexes, out in zip(row_indexes, outputs, strict=True):
                flat = indexes.reshape(-1)
                if device_kernels.are_usable(out):
                    device_kernels.copy_rows(out.view(-1, width), row_range, rows, flat)
                    continue
                is_in_range = (flat >= row_range.start) & (flat < row_range.stop)
                if not out.is_cuda:
                    hits = is_in_range.nonzero().squeeze(1)
                    num_found += len(hits)
                    out.view(-1, width)[hits] = rows.index_select(0, flat[hits] - row_range.start).to(out.dtype)
                    continue
                # Use a mask, because selecting the indexes that belong to this part would need a host sync.
                step = max(1, _LOOK_UP_NBYTES // (width * out.element_size()))
                for start in range(0, len(flat), step):
                    target = out.view(-1, width)[start : start + step]
                    positions = (flat[start : start + step] - row_range.start).clamp_(0, len(row_range) - 1)
                    values = rows.index_select(0, positions).to(out.dtype)
                    torch.where(is_in_range[start : start + step].unsqueeze(1), values, target, out=target)
    # On a device, rows with an invalid index stay NaN, which makes the step fail.
    if outputs and not outputs[0].is_cuda and num_found != sum(indexes.numel() for indexes in row_indexes):
        raise IndexError(f"an index is not in the range of {parts.shape[0]} rows")
    return outputs
