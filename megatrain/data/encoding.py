"""Rows to documents of tokens, written as a stream: only the last few rows are held in RAM."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np
import xxhash

from megatrain.data.chat import Encoded, RowEncoder
from megatrain.data.chat_rows import CHATS
from megatrain.data.formats import DataRow, PlainRow
from megatrain.data.images import refs_to_bytes
from megatrain.data.masks import TEMPLATE_FILE
from megatrain.data.row_kind import CodedDocument, RowKind
from megatrain.data.rows_report import DataError, DataReport, RowCounts, RowError
from megatrain.data.text_rows import CutDocument, TextCutter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.row_kind import Example


def load_tokenizer(name_or_path: str, *, chat_template: str = "auto") -> PreTrainedTokenizerFast:
    """Open a fast tokenizer. No code in the folder is run.

    Args:
        name_or_path: a folder with ``tokenizer.json``.
        chat_template: "auto" for the tokenizer's template, or the path of a .jinja file.

    Raises:
        DataError: the folder or its ``tokenizer.json`` is missing or cannot be opened.
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
            "there is no tokenizer.json: only fast tokenizers are read",
            "Set model.tokenizer_name_or_path if it is in another folder",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # from_pretrained raises many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            name_or_path, f"the tokenizer cannot be opened: {reason}", "Check tokenizer.json and tokenizer_config.json"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(name_or_path, "this tokenizer reports no offsets of its tokens: only fast tokenizers are read")
    if chat_template != "auto":
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            setattr(tokenizer, TEMPLATE_FILE, chat_template)
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
            raise DataError(
                chat_template, f"the chat template cannot be read: {reason}", "Save it as UTF-8 text, or name another"
            ) from None
    return cast("PreTrainedTokenizerFast", tokenizer)


def pad_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id for padding: the pad token, else end of text, else 0. It is never trained or attended to."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


Overlong = Literal["truncate", "drop", "error"]
_ROWS_AT_ONCE = 512  # tokenized together; a larger value uses more cores and more RAM
_CHARACTERS_AT_ONCE = 1 << 20
_FLUSH_TOKENS = 1 << 20
_FLUSH_IMAGE_BYTES = 1 << 26
_NUM_CONTENTS = 3  # tokens, masks and starts: the arrays in the content checksum


@dataclass(frozen=True, slots=True, repr=False)
class EncodingOptions:
    """Options that, with the rows and the tokenizer, determine the trained tokens.

    Attributes:
        max_length: maximum tokens of a document.
        overlong: treatment of longer conversations. Longer plain text is cut into pieces.
        bad_rows: "drop" to count rows that cannot be trained; "error" to stop at the first one.
        joins_texts: whether texts are joined and cut into pieces of ``max_length``; only a source's last is shorter.
    """

    max_length: int
    overlong: Overlong = "truncate"
    bad_rows: Literal["drop", "error"] = "drop"
    kind: RowKind = CHATS
    joins_texts: bool = False

    def __repr__(self) -> str:
        """Return the text that fingerprints of streams contain, so it must not change."""
        return (
            f"EncodingOptions(max_length={self.max_length!r}, overlong={self.overlong!r}, bad_rows={self.bad_rows!r}, "
            f"only_text={self.kind.only_text!r}, joins_texts={self.joins_texts!r}, preferences={self.kind.recorded!r})"
        )


#: Arrays of a data set (see ``TokenDataset``) -> their dtype, in the order in which they are written.
ARRAYS: Mapping[str, type[np.generic]] = {
    "tokens": np.int32,
    "trained": np.bool_,
    "starts": np.int64,
    "begins_row": np.bool_,
    "images": np.uint8,
    "image_starts": np.int64,
    "roles": np.uint8,
}
_CODES = {np.int32: "i", np.int64: "q"}  # for array.array; all others are bytes


class TokenWriter:
    """Writer of documents in sequence.

    Args:
        files: One for each of ``ARRAYS``, in this order. Not closed.
        before_write: called before each write with the total bytes after it.
    """

    def __init__(self, files: Sequence[BinaryIO], before_write: Callable[[int], None] = lambda nbytes: None) -> None:
        self._files = files
        self._before_write = before_write
        self._held = _nothing_held()
        self._held["starts"].append(0)
        self._held["image_starts"].append(0)
        self._images_digest = xxhash.xxh3_64()
        self._digests = tuple(xxhash.xxh3_64() for _ in files[:_NUM_CONTENTS])
        self._roles_digest: xxhash.xxh3_64 | None = None  # stays None while all roles are 0
        self._flushed_tokens = 0
        self.nbytes = 0
        self.num_documents = 0
        self.num_trained_tokens = 0
        self.num_image_bytes = 0
        self.largest_id = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents so far."""
        return self._flushed_tokens + len(self._held["tokens"])

    @property
    def content(self) -> str:
        """Checksum of all flushed data, as ``content_checksum`` computes it from tokens, masks and starts."""
        digests = self._digests if not self.num_image_bytes else (*self._digests, self._images_digest)
        roles = () if self._roles_digest is None else (self._roles_digest,)
        return "-".join(digest.hexdigest() for digest in (*digests, *roles))

    def add(self, document: CodedDocument) -> None:
        """Append a document."""
        tokens, trained, images = document.coded.tokens, document.coded.trained, document.coded.images
        value = document.value
        assert len(tokens) == len(trained), (len(tokens), len(trained))
        held = self._held
        self.largest_id = max(self.largest_id, max(tokens, default=0))
        held["tokens"].extend(tokens)
        held["trained"].extend(trained)
        if value is not None:
            held["tokens"].append(value[0])
            held["trained"].append(value[1])
        held["starts"].append(self.num_tokens)
        held["begins_row"].append(document.begins_row)
        held["roles"].append(document.role)
        references = refs_to_bytes(images)
        self.num_image_bytes += len(references)
        held["images"].frombytes(references)
        held["image_starts"].append(self.num_image_bytes)
        for ref in images:
            self._images_digest.update(f"{self.num_documents} {ref.checksum}\n".encode())
        self.num_documents += 1
        if len(held["tokens"]) >= _FLUSH_TOKENS or len(held["images"]) >= _FLUSH_IMAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the held data. Raises OSError."""
        held = {name: values.tobytes() for name, values in self._held.items()}
        self.num_trained_tokens += sum(self._held["trained"])
        self._flushed_tokens += len(self._held["tokens"])
        self._held = _nothing_held()
        self.nbytes += sum(map(len, held.values()))
        self._before_write(self.nbytes)
        for digest, content in zip(self._digests, held.values(), strict=False):
            digest.update(content)
        if any(held["roles"]):
            self._roles_digest = self._roles_digest or xxhash.xxh3_64()
            self._roles_digest.update(held["roles"])
        for file, content in zip(self._files, held.values(), strict=True):
            file.write(content)


def _nothing_held() -> dict[str, array[int]]:
    return {name: array(_CODES.get(dtype, "B")) for name, dtype in ARRAYS.items()}


class Encoder:
    """Encoder of rows, source after source, into a :class:`TokenWriter`.

    Args:
        options: lengths, and which rows are refused.
        on_rows: called with the number of rows after every few hundred.
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
        self._cutter = TextCutter(options.max_length, encoder.start_tokens, joins=options.joins_texts)
        self._open_is_kept = False  # whether a document of the current partial text was written
        self._examples: list[Example] = []
        self._last: Any = None  # state of the row kind from the previous examples

    def add_rows(self, rows: Iterable[DataRow | RowError]) -> None:
        """Encode rows and write their trained documents.

        Args:
            rows: may contain errors, in the place of unreadable rows.

        Raises:
            DataError: a row is too long and ``overlong`` is "error", a row is of another kind, or raised by
                ``RowEncoder.encode_many``.
            OSError: writing failed.
            RowError: a row cannot be trained and ``bad_rows`` is "error".
        """
        for batch in _batches(rows):
            texts: list[Sequence[PlainRow | RowError]] = []
            for row in batch:
                if isinstance(row, RowError):
                    texts.append([row])
                else:
                    self.counts.note("unread", row.unread, row.where)
                    texts.append(self._options.kind.texts_of(row))
            coded = self._encoder.encode_many(list(itertools.chain.from_iterable(texts)))
            for row, of_row in zip(batch, texts, strict=True):
                self._add(row, list(itertools.islice(coded, len(of_row))))
            self._write_examples()
            self._on_rows(self.counts.total.num_rows)

    def _add(self, row: DataRow | RowError, found: Sequence[Encoded | RowError]) -> None:
        """Process a row with its tokens, or with the error that prevents its training."""
        whole = [each for each in found if isinstance(each, Encoded)]
        self.counts.total.num_tokens += sum(len(each.tokens) for each in whole)
        error = next((each for each in found if isinstance(each, RowError)), None)
        if isinstance(row, RowError) or error is not None:
            assert error is not None, row
            self._drop(error, whole)
            return
        self.counts.note("left_out", dict.fromkeys(name for each in whole for name in each.left_out), row.where)
        special = dict.fromkeys(name for each in whole for name in each.special_tokens)
        self.counts.note("special_tokens", special, row.where)
        if any(each.is_text for each in whole):
            (text,) = whole
            self._add_text(text, row.where)
        elif kept := self._kept(row, whole):
            self._examples.append((row, kept))

    def _kept(self, row: DataRow, whole: Sequence[Encoded]) -> list[Encoded]:
        """Return the texts of a row as trained; an empty list if the row is dropped."""
        counts, options, max_length = self.counts.total, self._options, self._options.max_length
        longest = max(len(each.tokens) for each in whole)
        if error := options.kind.rejection(whole, row, max_length):
            self._drop(error, whole)
            return []
        if longest > max_length and options.overlong == "error":
            raise DataError(
                row.where,
                f"{longest} tokens are more than data.max_length = {max_length}",
                'Raise it, or write overlong = "truncate" or "drop"',
            )
        places = [place for each in whole for place in each.image_tokens]
        if options.overlong == "truncate" and any(place.start < max_length < place.stop for place in places):
            text = f"data.max_length = {max_length} would cut it within an image"
            reason = "data.max_length would cut it within an image"
            self._drop(RowError(row.where, text, "Raise it, or make the images smaller", reason=reason), whole)
            return []
        cut = list(whole)
        if longest > max_length:
            cut = [_cut(each, max_length) for each in whole]
        num_before, num_kept = (sum(len(each.tokens) for each in several) for several in (whole, cut))
        counts.num_rows += 1
        counts.num_tokens_lost += num_before - num_kept
        if num_kept < num_before:
            counts.num_rows_lost += 1
            if options.overlong == "drop":
                counts.num_too_long += 1
                counts.num_tokens_lost += num_kept
                return []
            counts.num_truncated += 1
        if all(any(each.trained) for each in cut):
            for each in whole:
                self.counts.add_turns(each.num_turns, each.untrained_turns, row.where)
            return cut
        counts.num_rows_lost += num_kept == num_before  # a cut row is counted already
        counts.num_tokens_lost += num_kept
        self._leave_untrained(row.where)
        return []

    def _drop(self, error: RowError, whole: Sequence[Encoded]) -> None:
        """Count a row that cannot be trained, and the tokens of its texts."""
        if self._options.bad_rows == "error":
            raise error
        self.counts.total.num_tokens_lost += sum(len(each.tokens) for each in whole)
        self.counts.drop(error)

    def _write_examples(self) -> None:
        """Write the examples collected so far."""
        options, examples, self._examples = self._options, self._examples, []
        documents, self._last = options.kind.documents_of(examples, options.max_length, self._last)
        for document in documents:
            self._writer.add(document)

    def _leave_untrained(self, where: str) -> None:
        if self._options.bad_rows == "error":
            raise RowError(where, "no token of this row would be trained", "Fix or remove the row, or raise max_length")
        self.counts.leave_untrained(where)

    def _add_text(self, coded: Encoded, where: str) -> None:
        self._add_pieces(self._cutter.cut(coded))
        self._open_is_kept |= self._options.joins_texts and bool(coded.tokens)
        if coded.is_end:
            self.counts.total.num_rows += 1
            if not self._open_is_kept:
                self.counts.total.num_rows_lost += 1
                self._leave_untrained(where)
            self._open_is_kept = False

    def end_source(self) -> None:
        """Mark the end of a source; its texts are not joined to texts of the next one."""
        self._add_pieces(self._cutter.finish())
        self._open_is_kept = False
        self.counts.end_source()

    def report(self) -> DataReport:
        """Flush the writer, and return the counts of rows."""
        writer = self._writer
        writer.flush()
        return self.counts.report(writer.num_documents, writer.num_tokens, writer.num_trained_tokens)

    def finish(self) -> DataReport:
        """Return the report of all sources; raise DataError if no token would be trained."""
        report = self.report()
        if not report.num_trained_tokens:
            first = self.counts.first_error
            raise DataError(
                "data.train",
                f"no token would be trained: {report}",
                "Check data.train_on and data.max_length" if first is None else f"The first row says: {first}",
            )
        return report

    def _add_pieces(self, pieces: Iterable[CutDocument]) -> None:
        self._write_examples()  # they precede these pieces
        for piece in pieces:
            if any(piece.trained):
                begins_row = self._options.joins_texts or not self._open_is_kept
                self._writer.add(CodedDocument(Encoded(piece.tokens, piece.trained, True), begins_row))
                self._open_is_kept = True
            else:
                self.counts.total.num_tokens_lost += len(piece.tokens) - piece.num_repeated


def _cut(coded: Encoded, max_length: int) -> Encoded:
    """Return the first ``max_length`` tokens of a row, with the images that they contain completely."""
    kept = [ref for ref, place in zip(coded.images, coded.image_tokens, strict=True) if place.stop <= max_length]
    tokens, trained = coded.tokens[:max_length], coded.trained[:max_length]
    return replace(coded, tokens=tokens, trained=trained, images=tuple(kept))


def _batches(rows: Iterable[DataRow | RowError]) -> Iterator[list[DataRow | RowError]]:
    """Yield rows in batches: many short rows, or few long ones."""
    batch: list[DataRow | RowError] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += 0 if isinstance(row, RowError) else row.num_characters
        if len(batch) == _ROWS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
