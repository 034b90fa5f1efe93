"""Conversion of rows to tokenized documents. Documents are written as a stream, so RAM holds only the latest rows."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np
import xxhash

from megatrain.data.chat import RowEncoder, TokenizedRow
from megatrain.data.formats import DataRow, PlainRow
from megatrain.data.images import refs_to_bytes
from megatrain.data.masks import TEMPLATE_FILE
from megatrain.data.row_kind import CHATS, RowKind, TokenDocument
from megatrain.data.rows_report import DataError, DataReport, RowCounts, RowError
from megatrain.data.text_rows import CutDocument, TextCutter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.row_kind import Example


def load_tokenizer(name_or_path: str, *, chat_template: str = "auto") -> PreTrainedTokenizerFast:
    """Open a fast tokenizer. No code from its folder is executed.

    Args:
        name_or_path: A folder with ``tokenizer.json``.
        chat_template: "auto" for the tokenizer's own template, or the path of a .jinja file.

    Raises:
        DataError: The folder, its ``tokenizer.json`` or the chat template is missing or cannot be opened.
    """
    from transformers import AutoTokenizer

    folder = Path(name_or_path)
    if not folder.is_dir():
        advice = "Check model.model_name_or_path"
        if not folder.is_absolute():
            advice = (
                f"Download the model first, for example: hf download {name_or_path} --local-dir models/{folder.name}"
            )
        raise DataError(name_or_path, "there is no such folder", advice)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            name_or_path,
            "there is no tokenizer.json: only fast tokenizers are supported",
            "Set model.tokenizer_name_or_path if it is in another folder",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # from_pretrained raises many types of errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            name_or_path, f"the tokenizer cannot be opened: {reason}", "Check tokenizer.json and tokenizer_config.json"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(name_or_path, "this tokenizer reports no token offsets: only fast tokenizers are supported")
    if chat_template != "auto":
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            setattr(tokenizer, TEMPLATE_FILE, chat_template)
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
            raise DataError(
                chat_template, f"the chat template cannot be read: {reason}", "Save it as UTF-8 text, or set another"
            ) from None
    return cast("PreTrainedTokenizerFast", tokenizer)


def pad_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the pad token's id, else the end-of-text token's id, else 0. Padding is never in the loss."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


Overlong = Literal["truncate", "drop", "error"]
_MAX_CALL_ROWS = 512  # rows tokenized in one call; a larger value uses more cores and more RAM
_MAX_CALL_CHARACTERS = 1 << 20
_FLUSH_TOKENS = 1 << 20
_FLUSH_IMAGE_BYTES = 1 << 26
_NUM_CHECKSUMMED_ARRAYS = 3  # the content checksum covers the first three arrays: tokens, trained and starts


@dataclass(frozen=True, slots=True, repr=False)
class EncodingOptions:
    """Options for converting rows to documents.

    Attributes:
        max_length: Maximum number of tokens in a document.
        overlong: Treatment of conversations longer than ``max_length``. Plain text is always split.
        bad_rows: "drop" to drop and count rows that cannot be used for training; "error" to stop at the first one.
        join_texts: Whether texts are concatenated and split into documents of exactly ``max_length`` tokens. Only
            a source's last document can be shorter.
    """

    max_length: int
    overlong: Overlong = "truncate"
    bad_rows: Literal["drop", "error"] = "drop"
    kind: RowKind = CHATS
    join_texts: bool = False

    def __repr__(self) -> str:
        """Return the options as text. Its format must never change, because stored stream fingerprints include it."""
        return (
            f"EncodingOptions(max_length={self.max_length!r}, overlong={self.overlong!r}, bad_rows={self.bad_rows!r}, "
            f"only_text={self.kind.is_text!r}, joins_texts={self.join_texts!r}, preferences={self.kind.key_name!r})"
        )


#: Data type of each array in a ``TokenDataset``. The arrays are written in this order.
ARRAYS: Mapping[str, type[np.generic]] = {
    "tokens": np.int32,
    "trained": np.bool_,
    "starts": np.int64,
    "begins_row": np.bool_,
    "images": np.uint8,
    "image_starts": np.int64,
    "roles": np.uint8,
}
_TYPE_CODES = {np.int32: "i", np.int64: "q"}  # type codes of array.array; all other arrays hold bytes


class TokenWriter:
    """Writer that appends documents to files, one file per array.

    Args:
        files: One open file for each entry of ``ARRAYS``, in the same order. The writer does not close the files.
        before_write: Called before each write with the total number of bytes after this write.
    """

    def __init__(self, files: Sequence[BinaryIO], before_write: Callable[[int], None] = lambda nbytes: None) -> None:
        self._files = files
        self._before_write = before_write
        self._buffers = _empty_buffers()
        self._buffers["starts"].append(0)
        self._buffers["image_starts"].append(0)
        self._images_digest = xxhash.xxh3_64()
        self._digests = tuple(xxhash.xxh3_64() for _ in files[:_NUM_CHECKSUMMED_ARRAYS])
        self._roles_digest: xxhash.xxh3_64 | None = None  # None while all roles are 0
        self._flushed_tokens = 0
        self.nbytes = 0
        self.num_documents = 0
        self.num_trained_tokens = 0
        self.num_image_bytes = 0
        self.largest_id = 0

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in the documents added so far."""
        return self._flushed_tokens + len(self._buffers["tokens"])

    @property
    def checksum(self) -> str:
        """Checksum of all flushed data. Equal to ``content_checksum`` if there are no images and no roles."""
        digests = self._digests if not self.num_image_bytes else (*self._digests, self._images_digest)
        roles = () if self._roles_digest is None else (self._roles_digest,)
        return "-".join(digest.hexdigest() for digest in (*digests, *roles))

    def add(self, document: TokenDocument) -> None:
        """Append a document."""
        tokens, trained, images = document.text.tokens, document.text.trained, document.text.images
        value = document.value
        assert len(tokens) == len(trained), (len(tokens), len(trained))
        buffers = self._buffers
        self.largest_id = max(self.largest_id, max(tokens, default=0))
        buffers["tokens"].extend(tokens)
        buffers["trained"].extend(trained)
        if value is not None:
            buffers["tokens"].append(value[0])
            buffers["trained"].append(value[1])
        buffers["starts"].append(self.num_tokens)
        buffers["begins_row"].append(document.begins_row)
        buffers["roles"].append(document.role)
        references = refs_to_bytes(images)
        self.num_image_bytes += len(references)
        buffers["images"].frombytes(references)
        buffers["image_starts"].append(self.num_image_bytes)
        for ref in images:
            self._images_digest.update(f"{self.num_documents} {ref.checksum}\n".encode())
        self.num_documents += 1
        if len(buffers["tokens"]) >= _FLUSH_TOKENS or len(buffers["images"]) >= _FLUSH_IMAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered data. Raises OSError."""
        buffers = {name: values.tobytes() for name, values in self._buffers.items()}
        self.num_trained_tokens += sum(self._buffers["trained"])
        self._flushed_tokens += len(self._buffers["tokens"])
        self._buffers = _empty_buffers()
        self.nbytes += sum(map(len, buffers.values()))
        self._before_write(self.nbytes)
        for digest, content in zip(self._digests, buffers.values(), strict=False):
            digest.update(content)
        if any(buffers["roles"]):
            self._roles_digest = self._roles_digest or xxhash.xxh3_64()
            self._roles_digest.update(buffers["roles"])
        for file, content in zip(self._files, buffers.values(), strict=True):
            file.write(content)


def _empty_buffers() -> dict[str, array[int]]:
    return {name: array(_TYPE_CODES.get(dtype, "B")) for name, dtype in ARRAYS.items()}


class Encoder:
    """Encoder that tokenizes one source at a time and adds the documents to a :class:`TokenWriter`.

    Args:
        on_rows: Called after every few hundred rows with the total number of rows so far.
    """

    def __init__(
        self,
        encoder: RowEncoder,
        writer: TokenWriter,
        options: EncodingOptions,
        on_rows: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.counts = RowCounts()
        self._encoder = encoder
        self._writer = writer
        self._options = options
        self._on_rows = on_rows
        self._cutter = TextCutter(options.max_length, encoder.start_tokens, join_texts=options.join_texts)
        self._text_has_document = False  # whether a document of the current text has been written
        self._examples: list[Example] = []
        self._kind_state: Any = None  # state that the last call to `documents_of` returned

    def add_rows(self, rows: Iterable[DataRow | RowError]) -> None:
        """Encode rows and write all documents that have tokens in the loss.

        Args:
            rows: Rows, and errors for rows that could not be read.

        Raises:
            DataError: A row is too long and ``overlong`` is "error", the row kind rejects a row, or
                ``RowEncoder.encode_many`` failed.
            OSError: A write failed.
            RowError: A row cannot be used for training and ``bad_rows`` is "error".
        """
        for batch in _batches(rows):
            texts: list[Sequence[PlainRow | RowError]] = []
            for row in batch:
                if isinstance(row, RowError):
                    texts.append([row])
                else:
                    self.counts.record("unread", row.unread_columns, row.location)
                    texts.append(self._options.kind.texts_of(row))
            encoded = self._encoder.encode_many(list(itertools.chain.from_iterable(texts)))
            for row, row_texts in zip(batch, texts, strict=True):
                self._add(row, list(itertools.islice(encoded, len(row_texts))))
            self._write_examples()
            self._on_rows(self.counts.total.num_rows)

    def _add(self, row: DataRow | RowError, results: Sequence[TokenizedRow | RowError]) -> None:
        """Count a row and queue its example. If one of the row's texts has an error, drop the row."""
        texts = [result for result in results if isinstance(result, TokenizedRow)]
        self.counts.total.num_tokens += sum(len(text.tokens) for text in texts)
        error = next((result for result in results if isinstance(result, RowError)), None)
        if isinstance(row, RowError) or error is not None:
            assert error is not None, row
            self._drop(error, texts)
            return
        omitted_fields = dict.fromkeys(name for text in texts for name in text.omitted_fields)
        self.counts.record("left_out", omitted_fields, row.location)
        special_tokens = dict.fromkeys(name for text in texts for name in text.special_tokens)
        self.counts.record("special_tokens", special_tokens, row.location)
        if any(text.is_text for text in texts):
            assert not self._options.kind.num_values, "pieces of plain text have no stored values"
            (text,) = texts
            self._add_text(text, row.location)
        elif kept_texts := self._fit_texts(row, texts):
            self._examples.append((row, kept_texts))

    def _fit_texts(self, row: DataRow, texts: Sequence[TokenizedRow]) -> list[TokenizedRow]:
        """Return a row's texts, truncated if necessary. Return an empty list if the row is dropped."""
        counts, options, max_length = self.counts.total, self._options, self._options.max_length
        longest_length = max(len(text.tokens) for text in texts)
        if error := options.kind.rejection(texts, row, max_length):
            self._drop(error, texts)
            return []
        if longest_length > max_length and options.overlong == "error":
            raise DataError(
                row.location,
                f"{longest_length} tokens are more than data.max_length = {max_length}",
                'Raise it, or set overlong = "truncate" or "drop"',
            )
        spans = [span for text in texts for span in text.image_tokens]
        if options.overlong == "truncate" and any(span.start < max_length < span.stop for span in spans):
            problem = f"data.max_length = {max_length} would truncate it within an image"
            reason = "data.max_length would truncate it within an image"
            self._drop(RowError(row.location, problem, "Raise it, or make the images smaller", reason=reason), texts)
            return []
        kept_texts = [_truncate(text, max_length) for text in texts]
        num_before, num_kept = (sum(len(text.tokens) for text in group) for group in (texts, kept_texts))
        counts.num_rows += 1
        counts.num_tokens_lost += num_before - num_kept
        if num_kept < num_before:
            counts.num_rows_lost += 1
            if options.overlong == "drop":
                counts.num_too_long += 1
                counts.num_tokens_lost += num_kept
                return []
            counts.num_truncated += 1
        if all(any(text.trained) for text in kept_texts):
            for text in texts:
                self.counts.add_turns(text.num_turns, text.untrained_turns, row.location)
            return kept_texts
        counts.num_rows_lost += num_kept == num_before  # truncated rows were already counted above
        counts.num_tokens_lost += num_kept
        self._count_untrained(row.location)
        return []

    def _drop(self, error: RowError, texts: Sequence[TokenizedRow]) -> None:
        """Count a row as dropped, and its tokens as lost. Raise the error if ``bad_rows`` is "error"."""
        if self._options.bad_rows == "error":
            raise error
        self.counts.total.num_tokens_lost += sum(len(text.tokens) for text in texts)
        self.counts.drop(error)

    def _write_examples(self) -> None:
        """Write the queued examples."""
        options, examples, self._examples = self._options, self._examples, []
        documents, self._kind_state = options.kind.documents_of(examples, options.max_length, self._kind_state)
        for document in documents:
            self._writer.add(document)

    def _count_untrained(self, location: str) -> None:
        if self._options.bad_rows == "error":
            problem = "no token of this row would be trained"
            raise RowError(location, problem, "Fix or remove the row, or raise max_length")
        self.counts.count_untrained(location)

    def _add_text(self, text: TokenizedRow, location: str) -> None:
        self._add_pieces(self._cutter.cut(text))
        self._text_has_document |= self._options.join_texts and bool(text.tokens)
        if text.is_end:
            self.counts.total.num_rows += 1
            if not self._text_has_document:
                self.counts.total.num_rows_lost += 1
                self._count_untrained(location)
            self._text_has_document = False

    def end_source(self) -> None:
        """Mark the end of a source, so that its last text is not joined to the next source's first text."""
        self._add_pieces(self._cutter.finish())
        self._text_has_document = False
        self.counts.end_source()

    def report(self) -> DataReport:
        """Flush the writer and return the report on all rows so far."""
        writer = self._writer
        writer.flush()
        return self.counts.report(writer.num_documents, writer.num_tokens, writer.num_trained_tokens)

    def finish(self) -> DataReport:
        """Return the report on all sources. Raises DataError if there is no token to train on."""
        report = self.report()
        if not report.num_trained_tokens:
            error = self.counts.first_error
            raise DataError(
                "data.train",
                f"no token would be trained: {report}",
                "Check data.train_on and data.max_length" if error is None else f"The first error is: {error}",
            )
        return report

    def _add_pieces(self, pieces: Iterable[CutDocument]) -> None:
        self._write_examples()  # write the queued examples first, because they come before these pieces
        for piece in pieces:
            if any(piece.trained):
                begins_row = self._options.join_texts or not self._text_has_document
                self._writer.add(TokenDocument(TokenizedRow(piece.tokens, piece.trained, True), begins_row))
                self._text_has_document = True
            else:
                self.counts.total.num_tokens_lost += len(piece.tokens) - piece.num_repeated


def _truncate(text: TokenizedRow, max_length: int) -> TokenizedRow:
    """Return a row's first ``max_length`` tokens, and the images that are completely within these tokens."""
    images = [ref for ref, span in zip(text.images, text.image_tokens, strict=True) if span.stop <= max_length]
    tokens, trained = text.tokens[:max_length], text.trained[:max_length]
    return replace(text, tokens=tokens, trained=trained, images=tuple(images))


def _batches(rows: Iterable[DataRow | RowError]) -> Iterator[list[DataRow | RowError]]:
    """Yield rows in batches. Each batch has a limited number of rows and characters."""
    batch: list[DataRow | RowError] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += 0 if isinstance(row, RowError) else row.num_characters
        if len(batch) == _MAX_CALL_ROWS or size >= _MAX_CALL_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
