"""The error of bad training data."""

from __future__ import annotations


class DataError(Exception):
    """Training data cannot be used; the text names the file and row, what was seen, and what to do.

    Attributes:
        where: file, and row or line where known.
    """

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        self.where = where
        super().__init__((f"{where}: " if where else "") + problem + (f". {remedy}" if remedy else ""))
