"""Logical matrices in one parameter. The model computes one matmul for all of them and splits the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FusedMatrix"]


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """Division of a parameter's rows or columns into logical matrices.

    Attributes:
        sizes: Number of rows (or columns) that each logical matrix has in one group, in order.
        num_groups: Number of consecutive groups. Each group has rows (or columns) of every logical matrix. With one
            group, the logical matrices are consecutive.
        divides_columns: Whether the matrices divide the columns of the parameter instead of its rows.
    """

    sizes: tuple[int, ...]
    num_groups: int = 1
    divides_columns: bool = False

    def __post_init__(self) -> None:
        assert self.sizes and min(self.sizes) > 0 and self.num_groups > 0, self
        # A row of the parameter spans all matrices and gets one learning rate factor, so all matrices must have equal
        # sizes.
        assert not self.divides_columns or len(set(self.sizes)) == 1, self

    @property
    def length(self) -> int:
        """Size of the parameter along the dimension that is divided."""
        return self.num_groups * sum(self.sizes)

    @property
    def needs_copies(self) -> bool:
        """Whether the logical matrices are not contiguous in the parameter."""
        return self.divides_columns or self.num_groups > 1

    def shapes(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Return `(rows, columns)` of each logical matrix, given the rows and columns of the parameter."""
        assert self.length == (columns if self.divides_columns else rows), (self, rows, columns)
        lengths = [self.num_groups * size for size in self.sizes]
        return [(rows, length) if self.divides_columns else (length, columns) for length in lengths]

    def views(self, matrix: Tensor) -> Sequence[Tensor]:
        """Return a 3-D view of each logical matrix. The divided dimension is split in two: (group, row or column).

        Args:
            matrix: [rows, columns], contiguous.
        """
        rows, columns = matrix.shape
        group = (self.num_groups, sum(self.sizes))
        shape = (rows, *group) if self.divides_columns else (*group, columns)
        return torch.split(matrix.view(shape), list(self.sizes), dim=2 if self.divides_columns else 1)

    def runs(self, columns: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return `(start, stop, logical matrix index)` of the contiguous ranges in a stack of row-divided matrices.

        Args:
            start: First requested element of the stack.
            stop: One past the last requested element.
        """
        assert not self.divides_columns, self
        ranges: list[tuple[int, int, int]] = []
        position = start - start % (columns * sum(self.sizes))  # start of the group that contains `start`
        while position < stop:
            for matrix_index, size in enumerate(self.sizes):
                end = position + size * columns
                if end > start and position < stop:
                    ranges.append((max(position, start), min(end, stop), matrix_index))
                position = end
        return ranges
