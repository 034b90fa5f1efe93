"""Rows of batches: their number and size, and the documents in each row. Packing never splits a document."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from megatrain.data.token_dataset import TokenDataset

WINDOW_SIZE = 4096  # documents packed together; larger windows need less padding, smaller windows mix documents better


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Number and size of the rows in each optimizer step.

    Attributes:
        micro_batch_size: Rows per micro-batch. Must be a multiple of the number of documents per example.
        max_length: Tokens in a packed row. Unpacked rows are padded to the micro-batch's longest row.
        packing: Whether a row can contain several documents.
    """

    micro_batch_size: int
    num_micro_batches: int
    max_length: int
    packing: bool

    def examples_per_step(self, num_documents: int) -> int:
        """Return the number of examples per step if each example has ``num_documents`` documents."""
        assert min(self.micro_batch_size, self.num_micro_batches) > 0, self
        assert num_documents == 1 or (self.micro_batch_size % num_documents == 0 and not self.packing), self
        return self.micro_batch_size // num_documents * self.num_micro_batches

    def assign(self, documents: npt.NDArray[np.int64], dataset: TokenDataset) -> RowTable:
        """Assign documents to rows. Without packing, each document is a row, in the given order."""
        if not self.packing:
            return RowTable(documents, np.arange(len(documents) + 1, dtype=np.int64))
        return pack_documents(documents, dataset.lengths()[documents], self.max_length)


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Documents of each row. The table uses at most 16 bytes of RAM per document.

    Attributes:
        members: Document indices of all rows, concatenated.
        starts: Position in ``members`` of each row's first document, followed by the length of ``members``.
    """

    members: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> list[int]:
        documents: list[int] = self.members[self.starts[row] : self.starts[row + 1]].tolist()
        return documents


def pack_documents(
    documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], capacity: int, *, window: int = WINDOW_SIZE
) -> RowTable:
    """Assign documents to rows by best fit decreasing within each window. The result is deterministic.

    Args:
        documents: Indices of the documents. Each window contains consecutive documents.
        lengths: Number of tokens in each document, from 1 to ``capacity``.
        capacity: Number of tokens in a row.
        window: Documents per window. Documents of different windows never share a row.
    """
    members = np.empty(len(documents), dtype=np.int64)
    starts = array("q", [0])
    for start in range(0, len(documents), window):
        span = slice(start, start + window)
        for row in _pack_window(lengths[span].tolist(), capacity):
            end = starts[-1] + len(row)
            members[starts[-1] : end] = documents[span][row]
            starts.append(end)
    return RowTable(members, np.array(starts, dtype=np.int64))


def _pack_window(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack the documents of one window. Return each row's documents, as indices into ``lengths``."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # sorted (free tokens, row); the best fit is the first row with enough
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        assert 0 < length <= capacity, (document, length, capacity)
        position = bisect_left(open_rows, (length, -1))
        if position == len(open_rows):
            row, free_tokens = len(rows), capacity
            rows.append([])
        else:
            free_tokens, row = open_rows.pop(position)
        rows[row].append(document)
        if free_tokens > length:
            insort(open_rows, (free_tokens - length, row))
    return rows
