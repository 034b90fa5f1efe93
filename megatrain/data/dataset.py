"""All training rows as tokens in memory: 5 bytes per token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.data.chat import Encoded, RowEncoder
from megatrain.data.errors import DataError
from megatrain.data.formats import Document, Row, read_rows
from tiered.checksums import checksum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerFast

    from megatrain.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows.

    Attributes:
        num_rows: rows read. num_documents: what is trained on (rows, or pieces of long text).
        num_truncated: conversations cut to max_length. num_too_long: conversations dropped for their length.
        num_untrained: rows dropped because no token of theirs would be trained.
        num_tokens, num_trained_tokens: in all documents together.
    """

    num_rows: int
    num_documents: int
    num_truncated: int
    num_too_long: int
    num_untrained: int
    num_tokens: int
    num_trained_tokens: int

    def __str__(self) -> str:
        share = 100.0 * self.num_trained_tokens / max(1, self.num_tokens)
        text = f"{self.num_rows:,} rows, {self.num_documents:,} documents, {self.num_tokens:,} tokens"
        text += f" ({share:.1f}% trained)"
        for count, what in (
            (self.num_truncated, "truncated"),
            (self.num_too_long, "dropped as too long"),
            (self.num_untrained, "dropped without a trained token"),
        ):
            if count:
                text += f", {count:,} {what}"
        return text


@dataclass(frozen=True)
class TokenDataset:
    """Documents as tokens.

    Attributes:
        tokens: int32 ids of all documents, one after the other.
        trained: for each, whether the loss asks for it; false for the first of each document.
        starts: where each document begins, and the end: int64, one more than there are documents.
        report: what was read and dropped.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    report: DataReport

    def __len__(self) -> int:
        return len(self.starts) - 1

    def fingerprint(self) -> str:
        """Return a checksum of all that a run sees of the data."""
        parts = (checksum(array.view(np.uint8)) for array in (self.tokens, self.trained, self.starts))
        return "-".join(parts)

    def lengths(self) -> list[int]:
        """Return the tokens of each document."""
        return [int(length) for length in np.diff(self.starts)]


def load_dataset(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> TokenDataset:
    """Read and tokenize every source of ``[[data.train]]``, in order.

    Raises:
        DataError: as ``read_rows`` and ``RowEncoder.encode``; or no token at all would be trained.
    """

    def rows() -> Iterable[Row]:
        for source in config.data.train:
            columns = {str(ours): theirs for ours, theirs in source.columns.items()}
            for row in read_rows(source.path, format=source.format, columns=columns, max_samples=source.max_samples):
                if config.task == "pretrain" and not isinstance(row, Document):
                    raise DataError(
                        row.where, 'task = "pretrain" trains plain text, this row is not', 'Write task = "sft"'
                    )
                yield row

    encoder = RowEncoder(tokenizer, train_on=config.data.train_on)
    return encode_rows(rows(), encoder, max_length=config.data.max_length, overlong=config.data.overlong)


def check_ids(dataset: TokenDataset, num_embeddings: int, *, where: str) -> None:
    """Refuse tokens that the model has no embedding for.

    Args:
        num_embeddings: rows of the model's input embedding. where: the tokenizer, for the message.

    Raises:
        DataError: the tokenizer is not the model's.
    """
    largest = int(dataset.tokens.max())
    if largest >= num_embeddings:
        raise DataError(
            where,
            f"this tokenizer gives the token id {largest}, but the model has embeddings for {num_embeddings} tokens "
            "(vocab_size)",
            "Use the model's own tokenizer",
        )


def encode_rows(
    rows: Iterable[Row], encoder: RowEncoder, *, max_length: int, overlong: str = "truncate"
) -> TokenDataset:
    """Tokenize rows. Text longer than ``max_length`` is cut into pieces, conversations as ``overlong`` says.

    Raises:
        DataError: a row is too long and ``overlong`` is "error"; or no token at all would be trained.
    """
    tokens, trained, starts = array("i"), bytearray(), array("q", [0])
    num_rows = num_truncated = num_too_long = num_untrained = 0
    for row in rows:
        num_rows += 1
        coded = encoder.encode(row)
        if len(coded.tokens) > max_length and not coded.is_text:
            if overlong == "error":
                raise DataError(
                    row.where,
                    f"{len(coded.tokens)} tokens are more than data.max_length = {max_length}",
                    'Raise it, or write overlong = "truncate" or "drop"',
                )
            if overlong == "drop":
                num_too_long += 1
                continue
            num_truncated += 1
        kept = False
        for piece_tokens, piece_trained in _pieces(coded, max_length):
            if any(piece_trained):
                kept = True
                tokens.extend(piece_tokens)
                trained.extend(piece_trained)
                starts.append(len(tokens))
        num_untrained += not kept
    report = DataReport(
        num_rows, len(starts) - 1, num_truncated, num_too_long, num_untrained, len(tokens), sum(trained)
    )
    if not report.num_trained_tokens:
        raise DataError("data.train", f"no token would be trained: {report}", "Check data.train_on and data.max_length")
    return TokenDataset(
        np.frombuffer(tokens, dtype=np.int32),
        np.frombuffer(bytes(trained), dtype=np.bool_),
        np.frombuffer(starts, dtype=np.int64),
        report,
    )


def _pieces(coded: Encoded, max_length: int) -> Iterable[tuple[list[int], list[bool]]]:
    """Yield the documents of a row: itself, cut to length, or all pieces of a text."""
    ends = range(0, len(coded.tokens), max_length) if coded.is_text else range(min(1, len(coded.tokens)))
    for start in ends:
        trained = coded.trained[start : start + max_length]
        trained[0] = False  # nothing in this document predicts its first token
        yield coded.tokens[start : start + max_length], trained
