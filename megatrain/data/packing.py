"""Best-fit packing of documents into rows of a fixed length. No document is split, and none attends to another."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 4096  # documents that are packed together; a larger window packs tighter, a smaller one mixes better


def pack_documents(
    documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], capacity: int, *, window: int = WINDOW
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Assign documents to rows, best fit decreasing within windows of neighbours. Takes 16 bytes of RAM per document.

    Args:
        documents: numbers of the documents, in packing order.
        lengths: tokens of each document, 1 to ``capacity``.
        capacity: tokens in a row.
        window: documents per window; documents of different windows share no row.

    Returns:
        The documents of all rows, row after row; and the start of each row, and the end. The result is
        deterministic.
    """
    members = np.empty(len(documents), dtype=np.int64)
    starts = array("q", [0])
    for start in range(0, len(documents), window):
        part = slice(start, start + window)
        for row in _pack_window(lengths[part].tolist(), capacity):
            end = starts[-1] + len(row)
            members[starts[-1] : end] = documents[part][row]
            starts.append(end)
    return members, np.array(starts, dtype=np.int64)


def _pack_window(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the documents of each row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted: the first row that is large enough fits best
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        assert 0 < length <= capacity, (document, length, capacity)
        best = bisect_left(room, (length, -1))
        if best == len(room):
            row, left = len(rows), capacity
            rows.append([])
        else:
            left, row = room.pop(best)
        rows[row].append(document)
        if left > length:
            insort(room, (left - length, row))
    return rows
