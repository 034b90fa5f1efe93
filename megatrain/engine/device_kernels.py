"""What Triton's kernels compute of a step on a GPU, where Triton is installed.

Without it torch's operators compute it, with more memory and many more launches. A kernel that is given fake
tensors makes what it would return, and nothing else: a plan counts the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "add_rows",
    "are_for",
    "copy_rows",
    "fakes_standing_for_gpu",
    "gradient_of_logits",
    "reads_sync_host",
    "row_groups",
    "stands_for_gpu",
    "take_in_logits",
    "warm_up",
]

_BLOCK_COLUMNS = 1024
#: Logits of a row whose exponentials are summed at once, by 8 warps.
_BLOCK_LOGITS, _LOGIT_WARPS = 4096, 8
#: Rows of a program of `group_rows`, and with how many others it compares them at once. More take all registers.
_BLOCK_ROWS, _BLOCK_OTHERS = 64, 32
#: Bytes that a thread of a GPU loads and stores at once at most.
_VECTOR_BYTES = 16


def reads_sync_host(device: torch.device) -> bool:
    """Return whether reading a value of a tensor waits for all work queued on the device."""
    return device.type == "cuda"


def are_for(tensor: Tensor) -> bool:
    """Return whether there are kernels for tensors on the device of this one."""
    return stands_for_gpu(tensor) or (tensor.is_cuda and _kernels_or_none() is not None)


def stands_for_gpu(tensor: Tensor) -> bool:
    """Return whether this is a fake tensor of the CPU in a plan for the GPU of another machine."""
    return _fakes_are_of_gpu and isinstance(tensor, FakeTensor)


@contextmanager
def fakes_standing_for_gpu(*, enabled: bool) -> Iterator[None]:
    """Trace what a GPU with Triton does, on a machine that may have none: with fake tensors of the CPU.

    Else a plan would count the operators that the CPU needs in place of these kernels, of products that add to fp32,
    and of attention over documents. For the process: the greenlets of a trace have contexts of their own.

    Args:
        enabled: False: fake tensors stand for what they say.
    """
    global _fakes_are_of_gpu
    before, _fakes_are_of_gpu = _fakes_are_of_gpu, enabled
    try:
        yield
    finally:
        _fakes_are_of_gpu = before


_fakes_are_of_gpu = False


@cache
def _kernels_or_none() -> ModuleType | None:
    try:
        return _kernels()
    except ImportError:
        return None


def _kernels() -> ModuleType:
    from megatrain.engine import triton_kernels

    return triton_kernels


def row_groups(indexes: Tensor) -> Tensor:
    """Return what `add_rows` needs to know of indexes [K]: [3, K] int32, on their device.

    Rows in the order of their indexes, see `triton_kernels.group_rows`. It is found on the device: the host need not
    know the indexes, which a model may have changed.
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
                block_others=_BLOCK_OTHERS,
                **_kernels().LAUNCH_OPTIONS,
            )
    return groups


def add_rows(place: Tensor, held: range, rows: Tensor, groups: Tensor, ignored: int | None) -> None:
    """Add rows [K, N], in order, to rows of a matrix; the host's `index_add_` gives the same bits.

    Args:
        place: [len(held), N] fp32, of contiguous rows.
        held: which rows of the matrix these are; rows with another index are left out.
        rows: any float dtype.
        groups: What ``row_groups`` says of the rows' indexes.
        ignored: rows with this index are left out, too.
    """
    assert place.dtype == torch.float32 and place.stride(1) == 1, (place.dtype, place.stride())
    num_rows, num_columns = rows.shape
    if num_rows and not isinstance(place, FakeTensor):
        with torch.accelerator.device_index(place.device.index):
            _kernels().add_rows[(num_rows, -(-num_columns // _BLOCK_COLUMNS))](
                place,
                rows,
                groups,
                num_rows,
                num_columns,
                place.stride(0),
                rows.stride(0),
                rows.stride(1),
                held.start,
                held.stop,
                -1 if ignored is None else ignored,
                block_columns=_BLOCK_COLUMNS,
                **_kernels().LAUNCH_OPTIONS,
            )


def copy_rows(found: Tensor, held: range, rows: Tensor, indexes: Tensor) -> None:
    """Look up rows of a part of a matrix.

    Args:
        found: [K, N], contiguous; rows of other parts stay as they are.
        held: Which rows of the matrix are here.
        rows: [len(held), N], these rows, any float dtype.
        indexes: [K], of the rows wanted.
    """
    assert found.is_contiguous() and rows.stride(1) == 1, (found.stride(), rows.stride())
    num_rows, num_columns = found.shape
    if num_rows and not isinstance(found, FakeTensor):
        with torch.accelerator.device_index(found.device.index):
            _kernels().copy_rows[(num_rows, -(-num_columns // _BLOCK_COLUMNS))](
                found,
                rows,
                indexes.contiguous(),
                num_columns,
                rows.stride(0),
                held.start,
                held.stop,
                block_columns=_BLOCK_COLUMNS,
                unit=_unit_of(found, rows) if _has_vectors(found) and _has_vectors(rows) else 1,
                **_kernels().LAUNCH_OPTIONS,
            )


def take_in_logits(
    logits: Tensor,
    labels: Tensor,
    start: int,
    *,
    largest: Tensor,
    exponentials: Tensor,
    of_label: Tensor,
    totals: Tensor | None,
) -> None:
    """Go on with cross entropy by the logits of some words, see `triton_kernels.take_in_logits`.

    Args:
        logits: [rows, columns], any float dtype.
        labels: [rows] int64, each a word.
        start: First word.
        largest: [rows] fp32; -inf before the first word.
        exponentials: [rows] fp32; 0.
        of_label: [rows] fp32.
        totals: [rows] fp32; 0.
    """
    logits = _with_vectors(logits)
    num_rows, num_columns = logits.shape
    if num_rows and not isinstance(logits, FakeTensor):
        with torch.accelerator.device_index(logits.device.index):
            _kernels().take_in_logits[(num_rows,)](
                logits,
                logits.stride(0),
                labels.contiguous(),
                start,
                num_columns,
                largest,
                exponentials,
                of_label,
                totals,
                block_columns=_BLOCK_LOGITS,
                unit=_unit_of(logits),
                **{**_kernels().LAUNCH_OPTIONS, "num_warps": _LOGIT_WARPS},
            )


def gradient_of_logits(
    logits: Tensor,
    labels: Tensor,
    start: int,
    log_sums: Tensor,
    *,
    weights: Tensor | None,
    num_items: int,
    z_loss: float,
    share: float,
    at_label: float,
) -> Tensor:
    """Return the gradient of cross entropy by the logits of some words, in their dtype.

    Args:
        logits: [rows, columns], any float dtype.
        labels: [rows] int64, each a word.
        start: First word.
        log_sums: [rows] fp32, log of the sum of the exponentials of all logits.
        weights: [rows] fp32, of the rows; None: 1 / num_items each.
        z_loss: Factor of the square of ``log_sums`` in the loss.
        share: Of the target, for every word.
    """
    logits = _with_vectors(logits)
    num_rows, num_columns = logits.shape
    gradient = torch.empty(num_rows, num_columns, dtype=logits.dtype, device=logits.device)
    if num_rows and not isinstance(logits, FakeTensor):
        with torch.accelerator.device_index(logits.device.index):
            _kernels().gradient_of_logits[(num_rows, -(-num_columns // _BLOCK_COLUMNS))](
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
                at_label,
                block_columns=_BLOCK_COLUMNS,
                unit=_unit_of(logits),
                **_kernels().LAUNCH_OPTIONS,
            )
    return gradient


def _unit_of(*matrices: Tensor) -> int:
    """Return the elements of 16 bytes where they divide the columns, else 1: see `triton_kernels`."""
    unit = _VECTOR_BYTES // min(matrix.dtype.itemsize for matrix in matrices)
    return 1 if matrices[0].shape[1] % unit else unit


def _has_vectors(matrix: Tensor) -> bool:
    """Return whether all rows begin at multiples of 16 bytes."""
    begin = matrix.storage_offset() * matrix.dtype.itemsize if isinstance(matrix, FakeTensor) else matrix.data_ptr()
    return begin % _VECTOR_BYTES == 0 and matrix.stride(0) * matrix.dtype.itemsize % _VECTOR_BYTES == 0


def _with_vectors(logits: Tensor) -> Tensor:
    """Return logits whose columns follow each other, copied where their rows begin anywhere.

    The order of a sum then depends on the number of columns alone, and on no address.
    """
    if logits.stride(1) == 1 and (_unit_of(logits) == 1 or _has_vectors(logits)):
        return logits
    return logits.clone(memory_format=torch.contiguous_format)


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels for a CUDA device, and weights and logits of a dtype: some seconds, once on a machine."""
    zeros = torch.zeros(1, device=device)
    if not are_for(zeros):
        return
    indexes = torch.zeros(1, dtype=torch.long, device=device)
    terms = {"z_loss": 0.0, "share": 0.0, "at_label": 1.0}
    for num_columns in (1, _VECTOR_BYTES):
        rows = torch.zeros(1, num_columns, dtype=dtype, device=device)
        place = torch.zeros(1, num_columns, device=device)
        add_rows(place, range(1), rows, row_groups(indexes), None)
        copy_rows(rows, range(1), rows.clone(), indexes)
        for totals in (None, zeros):
            take_in_logits(rows, indexes, 0, largest=zeros, exponentials=zeros, of_label=zeros, totals=totals)
        for weights in (None, zeros):
            gradient_of_logits(rows, indexes, 0, zeros, weights=weights, num_items=1, **terms)
