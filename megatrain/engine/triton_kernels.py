"""The Triton kernels of a step's gradients. Importing this file imports triton.

Kernels are compiled at their first launch, once for each dtype. No address and no size is compiled into the code: in
another placement a launch must not meet other code, and with it another order of a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LAUNCH_OPTIONS", "add_rows", "group_rows"]

LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}

# What `tl.sum` and `tl.max` reduce by. These two themselves run in the interpreter alone where all of Triton does.
_SUM, _MAX = tl.standard._sum_combine, tl.standard._elementwise_max


@triton.jit(do_not_specialize=["indexes", "groups", "num_rows"])
def group_rows(
    indexes: tl.tensor,
    groups: tl.tensor,
    num_rows: tl.tensor,
    block_rows: tl.constexpr,
    block_others: tl.constexpr,
) -> None:
    """Order rows by their indexes, those with the same index among them as they are: a stable sort.

    A row's place is the number of rows before it. All rows are compared with all others: that takes no memory, and of
    65,536 rows less time than a sort has launches.

    `groups` is [3, num_rows] int32: the row at each place of that order; its index; and how many rows have this index
    where it is the first of them, else 0.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    is_row = row < num_rows
    index = tl.load(indexes + row, mask=is_row, other=0).to(tl.int32)
    num_less = tl.full([block_rows], 0, tl.int32)
    num_before = tl.full([block_rows], 0, tl.int32)
    num_same = tl.full([block_rows], 0, tl.int32)
    for first in range(0, num_rows, block_others):
        other = first + tl.arange(0, block_others)
        is_other = other < num_rows
        its_index = tl.load(indexes + other, mask=is_other, other=0).to(tl.int32)
        is_same = is_other[None, :] & (its_index[None, :] == index[:, None])
        num_less += tl.reduce((is_other[None, :] & (its_index[None, :] < index[:, None])).to(tl.int32), 1, _SUM)
        num_before += tl.reduce((is_same & (other[None, :] < row[:, None])).to(tl.int32), 1, _SUM)
        num_same += tl.reduce(is_same.to(tl.int32), 1, _SUM)
    place = num_less + num_before
    tl.store(groups + place, row, mask=is_row)
    tl.store(groups + num_rows + place, index, mask=is_row)
    tl.store(groups + 2 * num_rows + place, tl.where(num_before == 0, num_same, 0), mask=is_row)


@triton.jit(
    do_not_specialize=[
        "place",
        "rows",
        "groups",
        "num_rows",
        "num_columns",
        "place_stride",
        "row_stride",
        "column_stride",
        "first",
        "stop",
        "ignored",
    ]
)
def add_rows(
    place: tl.tensor,
    rows: tl.tensor,
    groups: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    place_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    ignored: tl.tensor,
    block_columns: tl.constexpr,
) -> None:
    """Add rows to `place`: to rows `first` to `stop` of a matrix, in fp32. `groups`: see `group_rows`.

    A program has some columns of all rows with one index. It adds them in order, as `index_add_` does on the host.
    """
    at = tl.program_id(0)
    count = tl.load(groups + 2 * num_rows + at)
    index = tl.load(groups + num_rows + at)
    if (count > 0) & (index >= first) & (index < stop) & (index != ignored):
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
        inside = column < num_columns
        target = place + (index - first).to(tl.int64) * place_stride + column
        total = tl.load(target, mask=inside)
        for number in range(count):
            row = tl.load(groups + at + number).to(tl.int64)
            total += tl.load(rows + row * row_stride + column * column_stride, mask=inside).to(tl.float32)
        tl.store(target, total, mask=inside)
