"""Logical matrices that share a parameter: rows or columns of one product, which the model splits afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FusedMatrix"]


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """Assignment of the rows or columns of a parameter to several logical matrices.

    Attributes:
        sizes: Rows of each logical matrix in one group, in order.
        num_groups: Number of consecutive groups; every group has rows of each logical matrix. With 1, whole matrices
            follow one another.
        by_column: Whether columns are divided instead of rows.
    """

    sizes: tuple[int, ...]
    num_groups: int = 1
    by_column: bool = False

    def __post_init__(self) -> None:
        assert self.sizes and min(self.sizes) > 0 and self.num_groups > 0, self
        # With equal sizes, one learning rate factor serves all columns: rows of a matrix are updated together.
        assert not self.by_column or len(set(self.sizes)) == 1, self

    @property
    def length(self) -> int:
        """Number of rows of the parameter, or of columns if these are divided."""
        return self.num_groups * sum(self.sizes)

    @property
    def needs_copies(self) -> bool:
        """Whether the logical matrices are not contiguous in the parameter."""
        return self.by_column or self.num_groups > 1

    def shapes(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Return rows and columns of each logical matrix, given the parameter's rows and columns."""
        assert self.length == (columns if self.by_column else rows), (self, rows, columns)
        lengths = [self.num_groups * size for size in self.sizes]
        return [(rows, length) if self.by_column else (length, columns) for length in lengths]

    def views(self, matrix: Tensor) -> Sequence[Tensor]:
        """Return a view of each logical matrix, with its rows or columns in groups.

        Args:
            matrix: [rows, columns], contiguous.
        """
        rows, columns = matrix.shape
        group = (self.num_groups, sum(self.sizes))
        shape = (rows, *group) if self.by_column else (*group, columns)
        return torch.split(matrix.view(shape), list(self.sizes), dim=2 if self.by_column else 1)

    def runs(self, columns: int, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Return element ranges of a stack of row-divided matrices, each with the number of its logical matrix.

        Args:
            columns: Number of columns of each matrix.
            first: First requested element of the stack.
            stop: One past the last requested element.
        """
        assert not self.by_column, self
        found: list[tuple[int, int, int]] = []
        at = first - first % (columns * sum(self.sizes))  # groups of all matrices follow one another
        while at < stop:
            for number, size in enumerate(self.sizes):
                end = at + size * columns
                if end > first and at < stop:
                    found.append((max(at, first), min(end, stop), number))
                at = end
        return found
