"""Matrices that a parameter holds several of: rows or columns of one product that the model splits afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FusedMatrix"]


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """How the rows of a parameter, or its columns, belong to several logical matrices.

    Attributes:
        sizes: Rows of each logical matrix in one group, in order.
        num_groups: Groups that follow one another; each logical matrix has its rows of all groups. 1: matrices follow
            one another whole.
        by_column: Columns are divided instead of rows.
    """

    sizes: tuple[int, ...]
    num_groups: int = 1
    by_column: bool = False

    def __post_init__(self) -> None:
        assert self.sizes and min(self.sizes) > 0 and self.num_groups > 0, self
        # One factor on the learning rate serves all columns then: rows of a matrix are updated together.
        assert not self.by_column or len(set(self.sizes)) == 1, self

    @property
    def length(self) -> int:
        """Rows of the parameter, or columns."""
        return self.num_groups * sum(self.sizes)

    @property
    def needs_copies(self) -> bool:
        """Whether logical matrices are not contiguous where they lie."""
        return self.by_column or self.num_groups > 1

    def shapes(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Return rows and columns of each logical matrix, given those of the parameter."""
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
        """Return ranges of elements of a stack of matrices whose rows are divided, with their logical matrix's number.

        Args:
            columns: Number of columns of each matrix.
            first: First element of the stack that is asked for.
            stop: The one after the last.
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
