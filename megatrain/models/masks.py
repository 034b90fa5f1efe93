"""What transformers asks about positions before it makes a mask, answered where it cannot see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rows_are_documents() -> Iterator[None]:
    """Let transformers take it that every row is one document, so that causal attention needs no mask.

    It looks for restarts of the positions, and where it may not look, on fake tensors, makes a mask of [S, S].
    Not for several threads at once.
    """
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before
