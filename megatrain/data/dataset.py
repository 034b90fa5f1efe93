"""All training rows as documents of tokens, in memory-mapped files: RAM does not grow with the data."""

from __future__ import annotations

import io
import math
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatrain.data.cache import CacheEntry, TokenCache, cache_folder, cache_key, read_checksum
from megatrain.data.chat import RowEncoder
from megatrain.data.chat_rows import CHATS
from megatrain.data.encoding import ARRAYS, Encoder, EncodingOptions, TokenWriter
from megatrain.data.files import suffix_of
from megatrain.data.images import ImageProcessor, ImageRef, refs_from_bytes
from megatrain.data.row_kind import RowKind
from megatrain.data.rows_report import DataError, DataReport
from megatrain.data.sources import rows_of, source_files
from tiered import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.table import DataConfig


_WEIGHT = 2  # random stream; megatrain.data.loader has others
_SECONDS_BETWEEN_MESSAGES = 10.0
OnMessage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Sources of the data, and options for the conversion of rows to documents.

    Attributes:
        table: ``[data]``; its ``train`` lists the sources of these rows, in order.
        seed: determines the order of the data, and the rows of ``val_size``.
        images_folder: folder of the processor that prepares images. None if rows have none.
        scores: folder of a teacher's scores of the rows. None if there is no teacher.
    """

    table: DataConfig
    kind: RowKind
    seed: int
    images_folder: str | None = None
    scores: Path | None = None

    def with_keys(self, **keys: Any) -> DataSpec:
        """Return a copy with these keys of its table replaced."""
        return replace(self, table=self.table.model_copy(update=keys))

    def image_processor(self, tokenizer: PreTrainedTokenizerFast) -> ImageProcessor | None:
        """Return the processor for images, if rows may have any. Raises like :class:`ImageProcessor`."""
        if self.images_folder is None:
            return None
        return ImageProcessor(self.images_folder, tokenizer, self.table.max_length)

    @property
    def has_default_packing(self) -> bool:
        """Whether the config does not set the packing, so that another default may replace it."""
        return "packing" not in self.table.model_fields_set

    @property
    def encoding(self) -> EncodingOptions:
        """Options for the conversion of rows to documents, except ``train_on``."""
        table, joins = self.table, self.table.packing == "concat"
        return EncodingOptions(table.max_length, table.overlong, table.bad_rows, self.kind, joins)

    @property
    def source_names(self) -> list[str]:
        """Name of each source in messages."""
        return [f"data.train.{number} ({source.path})" for number, source in enumerate(self.table.train)]


@dataclass(frozen=True)
class TokenDataset:
    """Documents as tokens.

    Attributes:
        tokens: int32 ids of all documents, concatenated.
        trained: for each token, whether it has a loss; false for the first of each document.
        starts: int64 first token of each document, and the end.
        report: counts of the rows that were read and dropped.
        source_starts: first document of each source, and the end. Empty for one source.
        weights: uses of the documents of each source per epoch. Empty for 1 each.
        content: checksum of the first three arrays, or "" if not known yet.
        begins_row: for each document, whether it is the first (usually only) one of a row. Empty if each is a row.
        in_use: ascending numbers of the documents to use. None for all.
        images: images of all documents, as written by ``refs_to_bytes``.
        image_starts: first image byte of each document, and the end. Empty if no document has images.
        roles: role of each document in its example, defined by the kind of rows. Empty for 0.
        source_checksums: Returns the checksum of each source's files; reads files whose checksum is not cached. Empty
            if the rows come from no file.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    report: DataReport
    source_starts: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    content: str | None = None
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

    def key_of(self, document: int) -> str:
        """Return a checksum of a document's tokens and loss mask, by which its scores are found."""
        part = slice(int(self.starts[document]), int(self.starts[document + 1]))
        return checksum(self.tokens[part].tobytes() + self.trained[part].tobytes())

    def fingerprint(self) -> str:
        """Return a checksum of all data that a run uses. Reads no token if the cache knows the checksum."""
        text = self.content_of_all
        if any(weight != 1.0 for weight in self.weights):
            text += f"-{checksum(repr((self.source_starts, self.weights)).encode())}"
        return text if self.in_use is None else f"{text}-{checksum(self.in_use.view(np.uint8))}"

    @cached_property
    def content_of_all(self) -> str:
        """Checksum of all documents, used or not."""
        return self.content or content_checksum(self.tokens, self.trained, self.starts)

    @property
    def largest_id(self) -> int:
        """The largest token id."""
        return int(self.tokens.max()) if self.known_largest_id is None else self.known_largest_id

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document."""
        found: npt.NDArray[np.int64] = np.diff(self.starts) - self.kind.num_values
        return found

    def num_tokens_of(self, document: int) -> int:
        """Return the number of tokens of a document."""
        return int(self.starts[document + 1] - self.starts[document]) - self.kind.num_values

    def images_of(self, document: int) -> list[ImageRef]:
        """Return the images of a document, in order."""
        if not len(self.images):
            return []
        return refs_from_bytes(self.images[self.image_starts[document] : self.image_starts[document + 1]].tobytes())

    def release_pages(self) -> None:
        """Give the RAM of mapped files back to the system; a second read is not much slower.

        Without it, the process would appear to grow by all data that it has trained on.
        """
        owners: list[object] = [getattr(self, name).base for name in ARRAYS]
        for mapped in owners:
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def epoch_documents(self, data_seed: int) -> npt.NDArray[np.int64]:
        """Return the documents of an epoch, in order; a weight may repeat the documents of its source.

        The fraction of a weight selects the same documents in every epoch, by ``data_seed``. For examples with several
        documents, the first one is returned.
        """
        used = np.arange(len(self), dtype=np.int64) if self.in_use is None else self.in_use
        if self.kind.num_documents > 1:
            used = used[self.begins_row[used]]
        if all(weight == 1.0 for weight in self.weights):
            return used
        parts = []
        for number, weight in enumerate(self.weights):
            first, end = np.searchsorted(used, self.source_starts[number : number + 2])
            documents = used[first:end]
            whole = math.floor(weight)
            count = round((weight - whole) * len(documents))
            shuffled = np.random.default_rng((data_seed, _WEIGHT, number)).permutation(len(documents))
            parts += [*([documents] * whole), documents[np.sort(shuffled[:count])]]
        return np.concatenate(parts)


def content_checksum(
    tokens: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64]
) -> str:
    """Return a checksum of all tokens, masks and document boundaries."""
    return "-".join(checksum(np.ascontiguousarray(part).view(np.uint8)) for part in (tokens, trained, starts))


def load_dataset(
    data: DataSpec, tokenizer: PreTrainedTokenizerFast, on_message: OnMessage = lambda text: None
) -> TokenDataset:
    """Return every source, in order, from the cache; tokenize and cache it first if necessary.

    Rows held out by ``data.val_size`` are not in use.

    Args:
        on_message: called with the progress of a long tokenization, and with the reason if the cache is not used.

    Raises:
        DataError: raised by ``rows_of`` or ``RowEncoder.encode_many``; or no token would be trained; or
            ``data.cache_dir`` cannot be written.
        RowError: a row cannot be trained and ``data.bad_rows`` is "error".
    """
    files = [source_files(source.path, source.subset, source.split) for source in data.table.train]

    def encode(writer: TokenWriter) -> tuple[DataReport, tuple[int, ...]]:
        return _encode_sources(data, tokenizer, files, writer, on_message)

    weights = tuple(source.weight for source in data.table.train)
    folder = cache_folder(data.table.cache_dir, on_message)
    cache = None
    if folder is None:
        dataset = _in_memory(encode, data.kind)
    else:
        cache = TokenCache(folder, max_nbytes=data.table.max_cache_size, on_message=on_message)
        processor = data.image_processor(tokenizer)
        described = "" if processor is None else processor.describe()
        key = cache_key(data.table.train, files, tokenizer, data.table.train_on, data.encoding, cache, described)
        dataset = _dataset(cache.get(key, encode), data.kind)
    dataset = replace(dataset, weights=weights, source_checksums=partial(source_checksums, files, cache))
    if data.table.val_size is not None:
        dataset = hold_out(dataset, data.table.val_size, data.seed)
    if not len(dataset.epoch_documents(data.seed)):
        raise DataError("data.train", "with these weights no document is left", "Raise data.train.0.weight")
    return dataset


def source_checksums(files: Sequence[Sequence[Path]], cache: TokenCache | None) -> tuple[str, ...]:
    """Return the checksum of each source's files: contents, kinds and order, but not names.

    Args:
        cache: Stores checksums of files. None if the files are read.
    """
    of_file = read_checksum if cache is None else cache.file_checksum
    described = ("\n".join(f"{suffix_of(file)} {of_file(file)}" for file in paths) for paths in files)
    return tuple(checksum(text.encode()) for text in described)


def _encode_sources(
    data: DataSpec,
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[Sequence[Path]],
    writer: TokenWriter,
    on_message: OnMessage,
) -> tuple[DataReport, tuple[int, ...]]:
    """Tokenize every source; return the report and the first document of each source."""
    rows = RowEncoder(tokenizer, train_on=data.table.train_on, images=data.image_processor(tokenizer))
    encoder = Encoder(rows, writer, data.encoding, _progress(on_message))
    source_starts = [0]
    for source, paths in zip(data.table.train, files, strict=True):
        encoder.add_rows(rows_of(source, paths, data.kind))
        encoder.end_source()
        source_starts.append(writer.num_documents)
    return encoder.finish(), tuple(source_starts)


def _in_memory(encode: Callable[[TokenWriter], tuple[DataReport, tuple[int, ...]]], kind: RowKind) -> TokenDataset:
    made = InMemory()
    return made.dataset(*encode(made.writer), kind=kind)


class InMemory:
    """A writer of documents that are held in RAM."""

    def __init__(self) -> None:
        self._files = {name: io.BytesIO() for name in ARRAYS}
        self.writer = TokenWriter(tuple(self._files.values()))

    def dataset(self, report: DataReport, source_starts: tuple[int, ...] = (), kind: RowKind = CHATS) -> TokenDataset:
        """Return the documents that were written and flushed."""
        arrays = {name: np.frombuffer(file.getbuffer(), dtype=ARRAYS[name]) for name, file in self._files.items()}
        writer = self.writer
        return _dataset(CacheEntry(arrays, report, source_starts, writer.content, writer.largest_id), kind)


def _dataset(entry: CacheEntry, kind: RowKind) -> TokenDataset:
    return TokenDataset(
        **entry.arrays,
        report=entry.report,
        source_starts=entry.source_starts,
        content=entry.content,
        known_largest_id=entry.largest_id,
        kind=kind,
    )


def _progress(on_message: OnMessage) -> Callable[[int], None]:
    """Return a function that reports the number of finished rows every few seconds."""
    said = time.monotonic()

    def on_rows(count: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _SECONDS_BETWEEN_MESSAGES:
            said = time.monotonic()
            on_message(f"tokenizing: {count:,} rows")

    return on_rows


def check_ids(dataset: TokenDataset, num_embeddings: int, *, where: str) -> None:
    """Raise ``DataError`` for token ids without an embedding in the model.

    Args:
        num_embeddings: rows of the model's input embedding.
        where: the tokenizer, for the message.

    Raises:
        DataError: the tokenizer does not belong to the model.
    """
    largest = dataset.largest_id
    if largest >= num_embeddings:
        raise DataError(
            where,
            f"this tokenizer gives the token id {largest}, but the model has embeddings for {num_embeddings} tokens "
            "(vocab_size)",
            "Use the model's own tokenizer",
        )


#: Name of the held-out rows in metrics.
NAME = "val"
_HOLD_OUT = 3  # random stream; the loader and weights have others


def hold_out(dataset: TokenDataset, val_size: float, data_seed: int) -> TokenDataset:
    """Return a dataset without its held-out rows, which :func:`held_out_part` returns.

    The same data and ``data_seed`` give the same rows, whatever the batches, tiers and machine. All documents of a text
    are held out together.

    Args:
        val_size: share of the rows if below 1 (rounded, at least one row), else their number. Dropped rows do not
            count.

    Raises:
        DataError: no row would remain to train on.
    """
    row_of_document = np.cumsum(dataset.begins_row) - 1
    count = int(row_of_document[-1]) + 1
    wanted = max(1, round(val_size * count)) if val_size < 1 else int(val_size)
    if wanted >= count:
        shown = f"{wanted:,}" if val_size >= 1 else f"{val_size:g}"
        raise DataError(
            "data.val_size",
            f"data.val_size = {shown} leaves nothing to train on: the data has {count:,} row{'s' * (count > 1)}",
            "Write less, or separate rows in [[data.eval]]" if count > 1
            else "A text file is one row: write another file of text in [[data.eval]]",
        )  # fmt: skip
    is_held_out = np.zeros(count, dtype=np.bool_)
    is_held_out[np.random.default_rng((data_seed, _HOLD_OUT)).permutation(count)[:wanted]] = True
    return replace(dataset, in_use=np.flatnonzero(~is_held_out[row_of_document]))


def held_out_part(dataset: TokenDataset, max_samples: int | None = None) -> TokenDataset:
    """Return the rows that :func:`hold_out` removed, each once; only the first ``max_samples`` of them if given."""
    assert dataset.in_use is not None
    others = np.ones(len(dataset), dtype=np.bool_)
    others[dataset.in_use] = False
    documents = np.flatnonzero(others)
    if max_samples is not None:
        documents = documents[np.cumsum(dataset.begins_row[documents]) <= max_samples]
    return replace(dataset, in_use=documents, weights=())


def describe(held_out: TokenDataset) -> str:
    """Return a message about the rows of :func:`held_out_part`."""
    documents = held_out.in_use
    assert documents is not None
    rows = int(np.count_nonzero(held_out.begins_row[documents]))
    tokens = int(held_out.lengths()[documents].sum())
    pieces = "" if rows == len(documents) else f"{len(documents):,} documents, "
    return f"{rows:,} row{'s' * (rows != 1)} kept from training (data.val_size), {pieces}{tokens:,} tokens"
