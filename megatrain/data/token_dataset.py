"""Tokenized documents, and the choice of documents for an epoch and for evaluation."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatrain.data.encoding import ARRAYS
from megatrain.data.images import ImageRef, refs_from_bytes
from megatrain.data.row_kind import CHATS, RowKind
from megatrain.data.rows_report import DataError, DataReport, pluralize
from tiered import checksum

#: Indices of random streams. The order of rows uses streams 0 and 1.
_WEIGHT_STREAM, _HOLD_OUT_STREAM = 2, 3
#: Name of the held-out rows in metrics.
HELD_OUT_NAME = "val"


@dataclass(frozen=True)
class TokenDataset:
    """Tokenized documents.

    Attributes:
        tokens: Concatenated token ids of all documents.
        trained: Loss mask, one flag per token. The flag of each document's first token is false.
        starts: Index of each document's first token, followed by the length of ``tokens``.
        report: Counts of the rows that were read and dropped.
        source_starts: Index of each source's first document, followed by the number of documents. Can be empty if
            there is only one source.
        weights: For each source, how many times an epoch uses each document. Empty if every weight is 1.
        content_checksum: Checksum of ``tokens``, ``trained`` and ``starts``. None or "" if it has not been computed.
        begins_row: For each document, whether it is the first one made from its row. Most rows become one document.
        in_use: Ascending indices of the documents to use, or None for all documents.
        images: Images of all documents, serialized by ``refs_to_bytes``.
        image_starts: Offset of each document's first byte in ``images``, followed by the length of ``images``.
        roles: Role of each document in its example, as defined by ``kind``. Empty if every role is 0.
        source_checksums: Function that returns one checksum per source. Reads only files whose checksum is not cached.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    report: DataReport
    source_starts: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    content_checksum: str | None = None
    known_largest_id: int | None = None
    begins_row: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    in_use: npt.NDArray[np.int64] | None = None
    images: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    image_starts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    roles: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    kind: RowKind = CHATS
    source_checksums: Callable[[], tuple[str, ...]] = tuple

    def __post_init__(self) -> None:
        if not len(self.begins_row):
            object.__setattr__(self, "begins_row", np.ones(len(self), dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document_key(self, document: int) -> str:
        """Return a checksum of a document's tokens and loss mask. Teacher scores are stored under this key."""
        part = slice(int(self.starts[document]), int(self.starts[document + 1]))
        return checksum(self.tokens[part].tobytes() + self.trained[part].tobytes())

    def fingerprint(self) -> str:
        """Return a checksum of all data that a run uses. Read the tokens only if ``content_checksum`` is not set."""
        text = self.total_checksum
        if any(weight != 1.0 for weight in self.weights):
            text += f"-{checksum(repr((self.source_starts, self.weights)).encode())}"
        return text if self.in_use is None else f"{text}-{checksum(self.in_use.view(np.uint8))}"

    @cached_property
    def total_checksum(self) -> str:
        """Checksum of all documents, including those that are not in use."""
        return self.content_checksum or content_checksum(self.tokens, self.trained, self.starts)

    @property
    def largest_id(self) -> int:
        """Largest token id of any document."""
        return int(self.tokens.max()) if self.known_largest_id is None else self.known_largest_id

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens in each document."""
        lengths: npt.NDArray[np.int64] = np.diff(self.starts) - self.kind.num_values
        return lengths

    def length(self, document: int) -> int:
        """Return the number of tokens in a document."""
        return int(self.starts[document + 1] - self.starts[document]) - self.kind.num_values

    def document_images(self, document: int) -> list[ImageRef]:
        """Return a document's images, in order."""
        if not len(self.images):
            return []
        return refs_from_bytes(self.images[self.image_starts[document] : self.image_starts[document + 1]].tobytes())

    def release_pages(self) -> None:
        """Release the RAM of the memory-mapped files. Later reads usually find the data in the page cache.

        If this is not called, the process's resident memory grows with every read.
        """
        owners: list[object] = [getattr(self, name).base for name in ARRAYS]
        for owner in owners:
            if isinstance(owner, mmap.mmap):
                owner.madvise(mmap.MADV_DONTNEED)

    def epoch_documents(self, data_seed: int) -> npt.NDArray[np.int64]:
        """Return the documents of an epoch, in order. Each source is repeated according to its weight.

        For the fractional part of a weight, ``data_seed`` selects the same documents in every epoch. If an example has
        several documents, only its first document is returned.
        """
        candidates = np.arange(len(self), dtype=np.int64) if self.in_use is None else self.in_use
        if self.kind.num_documents > 1:
            candidates = candidates[self.begins_row[candidates]]
        if all(weight == 1.0 for weight in self.weights):
            return candidates
        parts = []
        for index, weight in enumerate(self.weights):
            start, stop = np.searchsorted(candidates, self.source_starts[index : index + 2])
            documents = candidates[start:stop]
            num_repeats = math.floor(weight)
            count = round((weight - num_repeats) * len(documents))
            permutation = np.random.default_rng((data_seed, _WEIGHT_STREAM, index)).permutation(len(documents))
            parts += [*([documents] * num_repeats), documents[np.sort(permutation[:count])]]
        return np.concatenate(parts)


def content_checksum(
    tokens: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64]
) -> str:
    """Return a checksum of all tokens, masks and document boundaries."""
    return "-".join(checksum(np.ascontiguousarray(part).view(np.uint8)) for part in (tokens, trained, starts))


def hold_out(dataset: TokenDataset, val_size: float, data_seed: int) -> TokenDataset:
    """Return a dataset without its held-out rows. :func:`held_out_part` returns the held-out rows.

    The choice of rows depends only on the data and ``data_seed``. All documents of a row are held out together.

    Args:
        val_size: Fraction of rows to hold out if below 1 (rounded, at least one row), else number of rows to hold out.
            Dropped rows are not counted.

    Raises:
        DataError: No row would be left to train on.
    """
    document_rows = np.cumsum(dataset.begins_row) - 1
    count = int(document_rows[-1]) + 1
    num_held_out = max(1, round(val_size * count)) if val_size < 1 else int(val_size)
    if num_held_out >= count:
        value_text = f"{num_held_out:,}" if val_size >= 1 else f"{val_size:g}"
        raise DataError(
            "data.val_size",
            f"data.val_size = {value_text} leaves nothing to train on: the data has {count:,} row{'s' * (count > 1)}",
            "Lower it, or use separate rows in [[data.eval]]" if count > 1
            else "A text file is one row: use another text file in [[data.eval]]",
        )  # fmt: skip
    is_held_out = np.zeros(count, dtype=np.bool_)
    is_held_out[np.random.default_rng((data_seed, _HOLD_OUT_STREAM)).permutation(count)[:num_held_out]] = True
    return replace(dataset, in_use=np.flatnonzero(~is_held_out[document_rows]))


def held_out_part(dataset: TokenDataset, max_samples: int | None = None) -> TokenDataset:
    """Return the rows that :func:`hold_out` removed, all with weight 1. Return at most ``max_samples`` rows."""
    assert dataset.in_use is not None
    is_held_out = np.ones(len(dataset), dtype=np.bool_)
    is_held_out[dataset.in_use] = False
    documents = np.flatnonzero(is_held_out)
    if max_samples is not None:
        documents = documents[np.cumsum(dataset.begins_row[documents]) <= max_samples]
    return replace(dataset, in_use=documents, weights=())


def describe(dataset: TokenDataset) -> str:
    """Return a message that states the number of held-out rows, documents and tokens."""
    documents = dataset.in_use
    assert documents is not None
    num_rows = int(np.count_nonzero(dataset.begins_row[documents]))
    num_tokens = int(dataset.lengths()[documents].sum())
    pieces = "" if num_rows == len(documents) else f"{len(documents):,} documents, "
    return f"{pluralize(num_rows, 'row')} held out from training (data.val_size), {pieces}{num_tokens:,} tokens"
