"""Best-fit packing of documents into rows of a fixed length. Documents are never split."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 4096  # documents packed together; a larger window needs less padding, a smaller window mixes documents better


def pack_documents(
    documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], capacity: int, *, window: int = WINDOW
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Assign documents to rows by best fit decreasing within each window. The result is deterministic.

    Args:
        documents: Indices of the documents. Each window contains consecutive documents.
        lengths: Number of tokens in each document, from 1 to ``capacity``.
        capacity: Number of tokens in a row.
        window: Documents per window. Documents of different windows never share a row.

    Returns:
        The concatenated documents of all rows, and the index of each row's first document, followed by the end. Both
        arrays together use at most 16 bytes of RAM per document.
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
    """Return the document indices of each row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # sorted (free tokens, row); the first row with enough free tokens is the best fit
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
