"""The errors of bad training data: files that cannot be used, and single rows that cannot be trained."""

from __future__ import annotations


class DataError(Exception):
    """Training data cannot be used; the text names the file and row, what was seen, and what to do.

    Attributes:
        where: file, and row or line where known.
    """

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        self.where = where
        super().__init__((f"{where}: " if where else "") + problem + (f". {remedy}" if remedy else ""))


class RowError(DataError):
    """One row cannot be trained, others may: it is left out and counted, unless ``data.bad_rows`` says "error".

    Attributes:
        reason: the problem without what is special about this row, for counting.
    """

    def __init__(self, where: str, problem: str, remedy: str = "", *, reason: str = "") -> None:
        super().__init__(where, problem, remedy or "Fix or remove the row")
        self.reason = reason or problem
