"""Rows kept from training to evaluate on: ``data.val_size``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.errors import DataError

if TYPE_CHECKING:
    from megatrain.data.dataset import TokenDataset

__all__ = ["NAME", "describe", "held_out_part", "hold_out"]

#: What metrics call these rows.
NAME = "val"
_HOLD_OUT = 3  # stream of random numbers, beside those of the loader and of weights


def hold_out(dataset: TokenDataset, val_size: float, data_seed: int) -> TokenDataset:
    """Return a dataset without some of its rows; :func:`held_out_part` has those.

    The same rows are taken from the same data with the same ``data_seed``, whatever the batches, tiers and machine. A
    text that was cut into several documents is taken whole.

    Args:
        val_size: below 1: that share of the rows, rounded, at least one; else so many. Rows that were dropped do not
            count.

    Raises:
        DataError: no row would be left to train on.
    """
    row_of_document = np.cumsum(dataset.begins_row) - 1
    count = int(row_of_document[-1]) + 1
    wanted = max(1, round(val_size * count)) if val_size < 1 else int(val_size)
    if wanted >= count:
        shown = f"{wanted:,}" if val_size >= 1 else f"{val_size:g}"
        raise DataError(
            "data.val_size",
            f"data.val_size = {shown} leaves nothing to train on: the data has {count:,} row{'s' * (count > 1)}",
            "Write less, or rows of their own in [[data.eval]]" if count > 1
            else "A text file is one row: write another file of text in [[data.eval]]",
        )  # fmt: skip
    is_held_out = np.zeros(count, dtype=np.bool_)
    is_held_out[np.random.default_rng((data_seed, _HOLD_OUT)).permutation(count)[:wanted]] = True
    return replace(dataset, in_use=np.flatnonzero(~is_held_out[row_of_document]))


def held_out_part(dataset: TokenDataset, max_samples: int | None = None) -> TokenDataset:
    """Return the rows that :func:`hold_out` took, each once; at most ``max_samples`` of them, from the start."""
    assert dataset.in_use is not None
    others = np.ones(len(dataset), dtype=np.bool_)
    others[dataset.in_use] = False
    documents = np.flatnonzero(others)
    if max_samples is not None:
        documents = documents[np.cumsum(dataset.begins_row[documents]) <= max_samples]
    return replace(dataset, in_use=documents, weights=())


def describe(held_out: TokenDataset) -> str:
    """Return what a person is told of the rows that :func:`held_out_part` returned."""
    documents = held_out.in_use
    assert documents is not None
    rows = int(np.count_nonzero(held_out.begins_row[documents]))
    tokens = int(held_out.lengths()[documents].sum())
    pieces = "" if rows == len(documents) else f"{len(documents):,} documents, "
    return f"{rows:,} row{'s' * (rows != 1)} kept from training (data.val_size), {pieces}{tokens:,} tokens"
