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

# Arguments of `tl.reduce`. `tl.sum` and `tl.max` would work in the interpreter only if all of Triton were interpreted.
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
    block_compared: tl.constexpr,
) -> None:
    """Sort rows by index. The sort is stable.

    The position of a row is the number of rows that precede it, so each row is compared with all other rows. This needs
    no scratch memory. For 65,536 rows, it takes less time than the kernel launches of a sort.

    `groups` is [3, num_rows] int32. Each column describes one position of the sorted order: the row, the row's index,
    and the number of rows with this index. This number is 0 except at the first row with each index.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    is_row = row < num_rows
    index = tl.load(indexes + row, mask=is_row, other=0).to(tl.int32)
    num_less = tl.full([block_rows], 0, tl.int32)
    num_before = tl.full([block_rows], 0, tl.int32)
    num_same = tl.full([block_rows], 0, tl.int32)
    for start in range(0, num_rows, block_compared):
        compared = start + tl.arange(0, block_compared)
        is_compared = compared < num_rows
        compared_index = tl.load(indexes + compared, mask=is_compared, other=0).to(tl.int32)
        is_same = is_compared[None, :] & (compared_index[None, :] == index[:, None])
        num_less += tl.reduce((is_compared[None, :] & (compared_index[None, :] < index[:, None])).to(tl.int32), 1, _SUM)
        num_before += tl.reduce((is_same & (compared[None, :] < row[:, None])).to(tl.int32), 1, _SUM)
        num_same += tl.reduce(is_same.to(tl.int32), 1, _SUM)
    position = num_less + num_before
    tl.store(groups + position, row, mask=is_row)
    tl.store(groups + num_rows + position, index, mask=is_row)
    tl.store(groups + 2 * num_rows + position, tl.where(num_before == 0, num_same, 0), mask=is_row)


@triton.jit(
    do_not_specialize=[
        "target",
        "rows",
        "groups",
        "num_rows",
        "num_columns",
        "target_stride",
        "row_stride",
        "column_stride",
        "start",
        "stop",
        "padding_idx",
    ]
)
def add_rows(
    target: tl.tensor,
    rows: tl.tensor,
    groups: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    target_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    padding_idx: tl.tensor,
    block_columns: tl.constexpr,
) -> None:
    """Add rows to `target`, which contains rows `start` to `stop` of an fp32 matrix. `groups` comes from `group_rows`.

    Each program adds some columns of all rows with the same index, in order, like `index_add_` on the host.
    """
    position = tl.program_id(0)
    count = tl.load(groups + 2 * num_rows + position)
    index = tl.load(groups + num_rows + position)
    if (count > 0) & (index >= start) & (index < stop) & (index != padding_idx):
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
        mask = column < num_columns
        pointer = target + (index - start).to(tl.int64) * target_stride + column
        total = tl.load(pointer, mask=mask)
        for i in range(count):
            row = tl.load(groups + position + i).to(tl.int64)
            source = rows + row * row_stride + column.to(tl.int64) * column_stride
            total += tl.load(source, mask=mask).to(tl.float32)
        tl.store(pointer, total, mask=mask)


@triton.jit(do_not_specialize=["out", "rows", "indexes", "num_columns", "row_stride", "start", "stop"])
def copy_rows(
    out: tl.tensor,
    rows: tl.tensor,
    indexes: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    block_columns: tl.constexpr,
    unit: tl.constexpr,
) -> None:
    """Copy the matrix row for each index in [`start`, `stop`) to `out`. Other rows of `out` stay unchanged."""
    position = tl.program_id(0).to(tl.int64)
    index = tl.load(indexes + position).to(tl.int64)
    if (index >= start) & (index < stop):
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
        mask = column < num_columns // unit * unit
        value = tl.load(_row(rows, index - start, row_stride, unit) + column, mask=mask)
        tl.store(_row(out, position, num_columns, unit) + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "logits",
        "row_stride",
        "labels",
        "start",
        "num_columns",
        "max_logits",
        "exp_sums",
        "label_logits",
        "logit_sums",
    ]
)
def add_logits(
    logits: tl.tensor,
    row_stride: tl.tensor,
    labels: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    max_logits: tl.tensor,
    exp_sums: tl.tensor,
    label_logits: tl.tensor,
    logit_sums: tl.tensor,
    block_columns: tl.constexpr,
    unit: tl.constexpr,
) -> None:
    """Add the logits of the part that starts at column `start` to cross entropy sums. Each program handles one row.

    All outputs are fp32 and have one value per row: `max_logits` is the largest logit, `exp_sums` the sum of all
    exponentials relative to it, `label_logits` the label's logit, and `logit_sums` the sum of all logits, or None.
    """
    row = tl.program_id(0)
    row_start = _row(logits, row, row_stride, unit)
    max_logit = tl.load(max_logits + row)
    exp_sum = tl.load(exp_sums + row)
    total = 0.0
    for block_start in range(0, num_columns, block_columns):
        column = block_start + tl.arange(0, block_columns)
        mask = column < num_columns // unit * unit
        value = tl.load(row_start + column, mask=mask, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(max_logit, tl.reduce(value, 0, _MAX))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # if all logits are -inf, the sum is 0, not NaN
        exp_sum = exp_sum * tl.exp(max_logit - shift) + tl.reduce(tl.exp(value - shift), 0, _SUM)
        max_logit = new_max
        if logit_sums is not None:
            total += tl.reduce(tl.where(mask, value, 0.0), 0, _SUM)
    tl.store(max_logits + row, max_logit)
    tl.store(exp_sums + row, exp_sum)
    if logit_sums is not None:
        tl.store(logit_sums + row, tl.load(logit_sums + row) + total)
    label = tl.load(labels + row) - start
    if (label >= 0) & (label < num_columns):
        tl.store(label_logits + row, tl.load(row_start + label).to(tl.float32))


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
def logits_gradient(
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
    label_weight: tl.tensor,
    block_columns: tl.constexpr,
    unit: tl.constexpr,
) -> None:
    """Write the gradient with respect to a part of the logits to `gradient` [rows, num_columns], in any float dtype.

    The gradient is probability x (1 + `z_factor` x log_sum) - `share`. In the label's column, `label_weight` is also
    subtracted. The result is multiplied by the row's weight, or divided by `divisor` if `weights` is None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    mask = column < num_columns // unit * unit
    log_sum = tl.load(log_sums + row)
    value = tl.load(_row(logits, row, row_stride, unit) + column, mask=mask, other=0.0).to(tl.float32)
    result = tl.exp(value - log_sum) * (1.0 + z_factor * log_sum) - share
    result = tl.where(column == tl.load(labels + row) - start, result - label_weight, result)
    if weights is not None:
        result = result * tl.load(weights + row)
    else:
        result = tl.math.div_rn(result, divisor)
    tl.store(_row(gradient, row, num_columns, unit) + column, result.to(gradient.dtype.element_ty), mask=mask)
