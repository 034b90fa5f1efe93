"""Functions that launch the Triton kernels that a step uses on a GPU.

Without Triton, torch operators compute the same results, but with more memory and many more kernel launches. With fake
tensors, the functions only allocate their results, so that a plan can count the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_BLOCK_COLUMNS = 1024
#: Number of logits in a row that a program sums at once, and number of warps per program.
_BLOCK_LOGITS, _LOGIT_WARPS = 4096, 8
#: For `group_rows`: rows per program, and rows compared with them at once. Larger blocks need too many registers.
_BLOCK_ROWS, _BLOCK_COMPARED = 64, 32
#: Maximum number of bytes that a GPU thread loads or stores at once.
_VECTOR_BYTES = 16


def has_sync_reads(device: torch.device) -> bool:
    """Return whether reading a tensor's values waits for all work that is queued on the device."""
    return device.type == "cuda"


def are_usable(tensor: Tensor) -> bool:
    """Return whether the kernels support tensors on this tensor's device."""
    return is_gpu_stand_in(tensor) or (tensor.is_cuda and _kernels_or_none() is not None)


def is_gpu_stand_in(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake CPU tensor that represents a GPU tensor in a plan."""
    return _are_fakes_on_gpu and isinstance(tensor, FakeTensor)


@contextmanager
def treat_fakes_as_gpu(*, enabled: bool) -> Iterator[None]:
    """Within the context, treat fake CPU tensors as tensors on a GPU with Triton. The machine needs neither.

    Otherwise a plan would count the CPU versions of these kernels, of matmuls with fp32 sums, and of attention over
    documents. The setting is process-wide, because a context variable would have a separate value in each greenlet.

    Args:
        enabled: Whether fake CPU tensors represent GPU tensors; False to treat them as CPU tensors.
    """
    global _are_fakes_on_gpu
    previous, _are_fakes_on_gpu = _are_fakes_on_gpu, enabled
    try:
        yield
    finally:
        _are_fakes_on_gpu = previous


_are_fakes_on_gpu = False


@cache
def _kernels_or_none() -> ModuleType | None:
    try:
        return _kernels()
    except ImportError:
        return None


def _kernels() -> ModuleType:
    from megatrain.engine.device import triton_kernels

    return triton_kernels


def row_groups(indexes: Tensor) -> Tensor:
    """Sort rows by their indexes [K] for `add_rows`, and return the order as [3, K] int32 on the same device.

    See `triton_kernels.group_rows` for the format. The order is computed on the device, where the model may
    have computed the indexes. Copying the indexes to the host would need a host sync.
    """
    indexes = indexes.contiguous()
    groups = torch.empty(3, len(indexes), dtype=torch.int32, device=indexes.device)
    if len(indexes) and not isinstance(indexes, FakeTensor):
        with torch.accelerator.device_index(indexes.device.index):
            _kernels().group_rows[(-(-len(indexes) // _BLOCK_ROWS),)](
                indexes,
                groups,
                len(indexes),
                block_rows=_BLOCK_ROWS,
                block_compared=_BLOCK_COMPARED,
                **_kernels().LAUNCH_OPTIONS,
            )
    return groups


def add_rows(target: Tensor, row_range: range, rows: Tensor, groups: Tensor, padding_idx: int | None) -> None:
    """Add rows [K, N], in order, to the rows of a matrix part. The result is bit-identical to `index_add_` on the host.

    Args:
        target: Part of the matrix to which rows are added, [len(row_range), N] fp32, each row contiguous.
        row_range: Range of matrix rows in ``target``. Rows with an index outside of this range are skipped.
        rows: Rows to add, [K, N] of any float dtype.
        groups: Result of ``row_groups`` for the indexes of ``rows``.
        padding_idx: Index whose rows are also skipped, if any.
    """
    assert target.dtype == torch.float32 and target.stride(1) == 1, (target.dtype, target.stride())
    num_rows, num_columns = rows.shape
    if num_rows and not isinstance(target, FakeTensor):
        with torch.accelerator.device_index(target.device.index):
            _kernels().add_rows[(num_rows, -(-num_columns // _BLOCK_COLUMNS))](
                target,
                rows,
                groups,
                num_rows,
                num_columns,
                target.stride(0),
                rows.stride(0),
                rows.stride(1),
                row_range.start,
                row_range.stop,
                -1 if padding_idx is None else padding_idx,
                block_columns=_BLOCK_COLUMNS,
                **_kernels().LAUNCH_OPTIONS,
            )


def copy_rows(out: Tensor, row_range: range, rows: Tensor, indexes: Tensor) -> None:
    """Copy to ``out`` the requested rows that one part of a matrix contains.

    Args:
        out: Contiguous output, [K, N]. Rows for indexes outside of ``row_range`` stay unchanged.
        row_range: Range of matrix rows in this part.
        rows: Rows of this part, [len(row_range), N] of any float dtype.
        indexes: Indexes of the requested rows, [K].
    """
    assert out.is_contiguous() and rows.stride(1) == 1, (out.stride(), rows.stride())
    num_rows, num_columns = out.shape
    if num_rows and not isinstance(out, FakeTensor):
        with torch.accelerator.device_index(out.device.index):
            _kernels().copy_rows[(num_rows, -(-num_columns // _BLOCK_COLUMNS))](
                out,
                rows,
                indexes.contiguous(),
                num_columns,
                rows.stride(0),
                row_range.start,
                row_range.stop,
                block_columns=_BLOCK_COLUMNS,
                unit=_vector_size(out, rows) if _is_aligned(out) and _is_aligned(rows) else 1,
                **_kernels().LAUNCH_OPTIONS,
            )


def add_logits(
    logits: Tensor,
    labels: Tensor,
    start: int,
    *,
    max_logits: Tensor,
    exp_sums: Tensor,
    label_logits: Tensor,
    logit_sums: Tensor | None,
) -> None:
    """Add the logits of a vocabulary part to the sums of a cross entropy; see `triton_kernels.add_logits`.

    Args:
        logits: [rows, columns], any float dtype.
        labels: Token ids [rows], int64.
        start: Token id of the first column.
        max_logits: Largest logit per row so far, [rows] fp32; initially -inf.
        exp_sums: Sum of exp(logit - largest) per row, [rows] fp32; initially 0.
        label_logits: Logit of each row's label, [rows] fp32.
        logit_sums: Sum of the logits per row, [rows] fp32, initially 0; None to skip this sum.
    """
    logits = _align_rows(logits)
    num_rows, num_columns = logits.shape
    if num_rows and not isinstance(logits, FakeTensor):
        with torch.accelerator.device_index(logits.device.index):
            _kernels().add_logits[(num_rows,)](
                logits,
                logits.stride(0),
                labels.contiguous(),
                start,
                num_columns,
                max_logits,
                exp_sums,
                label_logits,
                logit_sums,
                block_columns=_BLOCK_LOGITS,
                unit=_vector_size(logits),
                **{**_kernels().LAUNCH_OPTIONS, "num_warps": _LOGIT_WARPS},
            )


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    start: int,
    log_sums: Tensor,
    *,
    weights: Tensor | None,
    num_items: int,
    z_loss: float,
    share: float,
    label_weight: float,
) -> Tensor:
    """Return the gradient of cross entropy with respect to the logits of a vocabulary part, in the logits' dtype.

    Args:
        logits: [rows, columns], any float dtype.
        labels: Token ids [rows], int64.
        start: Token id of the first column.
        log_sums: [rows] fp32, logsumexp over the whole vocabulary.
        weights: [rows] fp32; None if each row has the weight 1 / num_items.
        z_loss: Factor of ``log_sums ** 2`` in the loss.
        share: Target probability of each column, from label smoothing.
    """
    logits = _align_rows(logits)
    num_rows, num_columns = logits.shape
    gradient = torch.empty(num_rows, num_columns, dtype=logits.dtype, device=logits.device)
    if num_rows and not isinstance(logits, FakeTensor):
        with torch.accelerator.device_index(logits.device.index):
            _kernels().logits_gradient[(num_rows, -(-num_columns // _BLOCK_COLUMNS))](
                gradient,
                logits,
                logits.stride(0),
                labels.contiguous(),
                start,
                num_columns,
                log_sums,
                None if weights is None else weights.contiguous(),
                float(num_items),
                2 * z_loss,
                share,
                label_weight,
                block_columns=_BLOCK_COLUMNS,
                unit=_vector_size(logits),
                **_kernels().LAUNCH_OPTIONS,
            )
    return gradient


def _vector_size(*matrices: Tensor) -> int:
    """Return the number of elements in 16 bytes, or 1 if this number does not divide the number of columns."""
    size = _VECTOR_BYTES // min(matrix.dtype.itemsize for matrix in matrices)
    return 1 if matrices[0].shape[1] % size else size


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows are aligned to 16 bytes."""
    begin = matrix.storage_offset() * matrix.dtype.itemsize if isinstance(matrix, FakeTensor) else matrix.data_ptr()
    return begin % _VECTOR_BYTES == 0 and matrix.stride(0) * matrix.dtype.itemsize % _VECTOR_BYTES == 0


def _align_rows(logits: Tensor) -> Tensor:
    """Return the logits with contiguous, aligned rows. Copy them if necessary.

    Without the copy, the order in which a kernel adds logits could depend on their address.
    """
    if logits.stride(1) == 1 and (_vector_size(logits) == 1 or _is_aligned(logits)):
        return logits
    return logits.clone(memory_format=torch.contiguous_format)


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels for a device and for the dtype of weights and logits. Takes seconds, once per machine."""
    zeros = torch.zeros(1, device=device)
    if not are_usable(zeros):
        return
    indexes = torch.zeros(1, dtype=torch.long, device=device)
    options = {"z_loss": 0.0, "share": 0.0, "label_weight": 1.0}
    for num_columns in (1, _VECTOR_BYTES):
        rows = torch.zeros(1, num_columns, dtype=dtype, device=device)
        target = torch.zeros(1, num_columns, device=device)
        add_rows(target, range(1), rows, row_groups(indexes), None)
        copy_rows(rows, range(1), rows.clone(), indexes)
        for logit_sums in (None, zeros):
            add_logits(rows, indexes, 0, max_logits=zeros, exp_sums=zeros, label_logits=zeros, logit_sums=logit_sums)
        for weights in (None, zeros):
            logits_gradient(rows, indexes, 0, zeros, weights=weights, num_items=1, **options)
