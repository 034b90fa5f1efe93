"""What Triton's kernels compute of a step on a GPU, where Triton is installed.

Without it torch's operators compute the same, with more memory and many more launches. A kernel that is given fake
tensors makes what it would return, and nothing else: a plan counts the memory.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["add_rows", "are_for", "row_groups", "warm_up"]

_BLOCK_COLUMNS = 1024
#: Rows of a program of `group_rows`, and with how many others it compares them at once.
_BLOCK_ROWS, _BLOCK_OTHERS = 64, 128


def are_for(tensor: Tensor) -> bool:
    """Return whether there are kernels for tensors on the device of this one."""
    return tensor.is_cuda and _kernels_or_none() is not None


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
        groups: of the rows' indexes.
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


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels for a CUDA device and gradients of a dtype: some seconds, once on a machine."""
    place = torch.zeros(1, 1, device=device)
    if are_for(place):
        indexes = torch.zeros(1, dtype=torch.long, device=device)
        add_rows(place, range(1), torch.zeros(1, 1, dtype=dtype, device=device), row_groups(indexes), None)
