"""Best-fit packing: documents into rows of a fixed length, none split, none seeing another."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 4096  # documents that are packed together; more pack tighter, fewer mix better


def pack_documents(
    documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], capacity: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pack documents as :func:`pack` does, with 16 bytes of RAM for each.

    Args:
        documents: their numbers, in the order in which they are packed.
        lengths: tokens of each of them.
        capacity: tokens in a row.

    Returns:
        The documents of all rows, one row after the other; and where each row begins, and the end.
    """
    members = np.empty(len(documents), dtype=np.int64)
    starts = array("q", [0])
    for start in range(0, len(documents), WINDOW):
        part = slice(start, start + WINDOW)
        for row in pack(lengths[part].tolist(), capacity):
            end = starts[-1] + len(row)
            members[starts[-1] : end] = documents[part][row]
            starts.append(end)
    return members, np.array(starts, dtype=np.int64)


def pack(lengths: Sequence[int], capacity: int, *, window: int = WINDOW) -> list[list[int]]:
    """Distribute documents over rows, best fit decreasing within windows of neighbours.

    Args:
        lengths: tokens of each document, 1 to ``capacity``.
        capacity: tokens in a row.
        window: documents per window; documents of different windows share no row.

    Returns:
        For each row the indices of its documents. The same input gives the same rows.
    """
    rows: list[list[int]] = []
    for start in range(0, len(lengths), window):
        rows.extend(_pack_window(range(start, min(start + window, len(lengths))), lengths, capacity))
    return rows


def _pack_window(documents: range, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted: the first that is large enough fits best
    for document in sorted(documents, key=lambda index: (-lengths[index], index)):
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
