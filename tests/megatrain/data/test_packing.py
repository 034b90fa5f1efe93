"""Packing puts every document as a whole into exactly one row, and leaves little space unused."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.packing import WINDOW_SIZE, pack_documents

CAPACITY = 50
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=200)


def pack(lengths: list[int], capacity: int, *, window: int = WINDOW_SIZE) -> list[list[int]]:
    """Pack documents that are numbered in reverse. Return each row's documents, as indexes into ``lengths``."""
    documents = np.arange(len(lengths), dtype=np.int64)[::-1]
    sizes = np.array(lengths, dtype=np.int64)
    table = pack_documents(documents, sizes, capacity, window=window)
    return [[len(lengths) - 1 - document for document in table[row]] for row in range(len(table))]


@given(LENGTHS, st.integers(1, 60))
def test_packing_uses_every_document_once_within_capacity(lengths: list[int], window: int) -> None:
    rows = pack(lengths, CAPACITY, window=window)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= CAPACITY for row in rows)


@given(LENGTHS)
def test_no_two_rows_fit_into_one(lengths: list[int]) -> None:
    filled = sorted(sum(lengths[index] for index in row) for row in pack(lengths, CAPACITY))
    assert len(filled) < 2 or filled[0] + filled[1] > CAPACITY


@given(LENGTHS, st.integers(1, 60))
def test_windows_do_not_mix(lengths: list[int], window: int) -> None:
    for row in pack(lengths, CAPACITY, window=window):
        assert len({index // window for index in row}) == 1


@given(LENGTHS)
def test_same_input_same_rows(lengths: list[int]) -> None:
    assert pack(lengths, CAPACITY) == pack(list(lengths), CAPACITY)


def test_best_fit_beats_first_fit() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert pack([], 10) == []
