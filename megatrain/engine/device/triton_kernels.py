"""Triton kernels of a step: operations on rows of a matrix, and cross entropy. Importing this file imports triton.

Kernels are compiled at their first launch, once per dtype. The compiled code does not depend on addresses or sizes.
Otherwise a different placement could lead to different code, which could add numbers in a different order.

Three kernels have the parameter `unit`. Rows must start at multiples of `unit` elements, and `num_columns` must be a
multiple of `unit`. If `unit` elements have at least 16 bytes, a thread loads and stores 16 bytes at once. The value 1
is always allowed.
"""

from __future__ import annotations

import triton
import triton.language as tl

LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}

# Combine functions of `tl.sum` and `tl.max`, which work in the interpreter only if all of Triton is interpreted.
_SUM, _MAX = tl.standard._sum_combine, tl.standard._elementwise_max


@triton.jit
def _row(start: tl.tensor, row: tl.tensor, row_stride: tl.tensor, unit: tl.constexpr) -> tl.tensor:
    """Return the address of a row. If `unit` is not 1, promise the compiler that the address is 16-byte aligned."""
    begin = start + row.to(tl.int64) * row_stride
    return begin if unit == 1 else tl.multiple_of(begin, 16)


@triton.jit(do_not_specialize=["indexes", "groups", "num_rows"])
def group_rows(
    indexes: tl.tensor,
    groups: tl.tensor,
    num_rows: tl.tensor,
    block_rows: tl.constexpr,
    block_others: tl.constexpr,
) -> None:
    """Sort rows by index. The sort is stable.

    The position of a row is the number of rows that precede it, so each row is compared with all other rows. This needs
    no memory. For 65,536 rows, it takes less time than the kernel launches of a sort.

    `groups` is [3, num_rows] int32. Each column describes one position of the sorted order: the row, the row's index,
    and the number of rows with this index. This number is 0 except at the first row with an index.
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
    """Add rows to `place`, which contains rows `first` to `stop` of an fp32 matrix. `groups` comes from `group_rows`.

    Each program adds some columns of all rows with the same index, in order, like `index_add_` on the host.
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
            source = rows + row * row_stride + column.to(tl.int64) * column_stride
            total += tl.load(source, mask=inside).to(tl.float32)
        tl.store(target, total, mask=inside)


@triton.jit(do_not_specialize=["found", "rows", "indexes", "num_columns", "row_stride", "first", "stop"])
def copy_rows(
    found: tl.tensor,
    rows: tl.tensor,
    indexes: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    block_columns: tl.constexpr,
    unit: tl.constexpr,
) -> None:
    """Copy the matrix row for each index in [`first`, `stop`) to `found`. Other rows of `found` stay unchanged."""
    at = tl.program_id(0).to(tl.int64)
    index = tl.load(indexes + at).to(tl.int64)
    if (index >= first) & (index < stop):
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
        inside = column < num_columns // unit * unit
        value = tl.load(_row(rows, index - first, row_stride, unit) + column, mask=inside)
        tl.store(_row(found, at, num_columns, unit) + column, value.to(found.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "logits",
        "row_stride",
        "labels",
        "start",
        "num_columns",
        "largest",
        "exponentials",
        "of_label",
        "totals",
    ]
)
def add_logits(
    logits: tl.tensor,
    row_stride: tl.tensor,
    labels: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    largest: tl.tensor,
    exponentials: tl.tensor,
    of_label: tl.tensor,
    totals: tl.tensor,
    block_columns: tl.constexpr,
    unit: tl.constexpr,
) -> None:
    """Add the logits of the part that starts at column `start` to a cross entropy. Each program handles one row.

    All sums are fp32 and have one value per row: `largest` is the largest logit, `exponentials` the sum of exp(logit -
    largest), `of_label` the label's logit, and `totals` the sum of all logits, or None.
    """
    row = tl.program_id(0)
    own = _row(logits, row, row_stride, unit)
    most = tl.load(largest + row)
    found = tl.load(exponentials + row)
    total = 0.0
    for first in range(0, num_columns, block_columns):
        column = first + tl.arange(0, block_columns)
        inside = column < num_columns // unit * unit
        value = tl.load(own + column, mask=inside, other=float("-inf")).to(tl.float32)
        more = tl.maximum(most, tl.reduce(value, 0, _MAX))
        shift = tl.where(more == float("-inf"), 0.0, more)  # if all logits are -inf, the sum is 0, not NaN
        found = found * tl.exp(most - shift) + tl.reduce(tl.exp(value - shift), 0, _SUM)
        most = more
        if totals is not None:
            total += tl.reduce(tl.where(inside, value, 0.0), 0, _SUM)
    tl.store(largest + row, most)
    tl.store(exponentials + row, found)
    if totals is not None:
        tl.store(totals + row, tl.load(totals + row) + total)
    label = tl.load(labels + row) - start
    if (label >= 0) & (label < num_columns):
        tl.store(of_label + row, tl.load(own + label).to(tl.float32))


@triton.jit(
    do_not_specialize=[
        "gradient",
        "logits",
        "row_stride",
        "labels",
        "start",
        "num_columns",
        "log_sums",
        "weights",
    ]
)
def gradient_of_logits(
    gradient: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    labels: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    log_sums: tl.tensor,
    weights: tl.tensor,
    divisor: tl.tensor,
    z_factor: tl.tensor,
    share: tl.tensor,
    at_label: tl.tensor,
    block_columns: tl.constexpr,
    unit: tl.constexpr,
) -> None:
    """Write the gradient with respect to a part of the logits to `gradient` [rows, num_columns], in any float dtype.

    The gradient is probability x (1 + `z_factor` x log_sum) - `share`. In the label's column, `at_label` is also
    subtracted. The result is multiplied by the row's weight, or divided by `divisor` if `weights` is None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = column < num_columns // unit * unit
    log_sum = tl.load(log_sums + row)
    value = tl.load(_row(logits, row, row_stride, unit) + column, mask=inside, other=0.0).to(tl.float32)
    found = tl.exp(value - log_sum) * (1.0 + z_factor * log_sum) - share
    found = tl.where(column == tl.load(labels + row) - start, found - at_label, found)
    if weights is not None:
        found = found * tl.load(weights + row)
    else:
        found = tl.math.div_rn(found, divisor)
    tl.store(_row(gradient, row, num_columns, unit) + column, found.to(gradient.dtype.element_ty), mask=inside)
