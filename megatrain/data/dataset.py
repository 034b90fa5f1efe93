"""Tokenized training data in memory-mapped files. RAM use does not grow with the size of the data."""

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


_WEIGHT_STREAM = 2  # index of this module's random stream; megatrain.data.loader uses streams 0 and 1
_SECONDS_BETWEEN_MESSAGES = 10.0
OnMessage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Sources of the data, and options for converting rows to documents.

    Attributes:
        table: Config table ``[data]``. Its key ``train`` lists the sources in order.
        seed: Random seed for the order of the data and for the choice of held-out rows (``val_size``).
        images_folder: Folder of the image processor, or None if rows have no images.
        scores: Folder with a teacher's scores, or None if the run has no teacher.
    """

    table: DataConfig
    kind: RowKind
    seed: int
    images_folder: str | None = None
    scores: Path | None = None

    def with_keys(self, **keys: Any) -> DataSpec:
        """Return a copy whose ``table`` has these keys replaced."""
        return replace(self, table=self.table.model_copy(update=keys))

    def image_processor(self, tokenizer: PreTrainedTokenizerFast) -> ImageProcessor | None:
        """Return the image processor, or None without ``images_folder``. Raises the same errors as its constructor."""
        if self.images_folder is None:
            return None
        return ImageProcessor(self.images_folder, tokenizer, self.table.max_length)

    @property
    def has_default_packing(self) -> bool:
        """Whether the config leaves ``packing`` at its default."""
        return "packing" not in self.table.model_fields_set

    @property
    def encoding(self) -> EncodingOptions:
        """All options for converting rows to documents, except ``train_on``."""
        table, joins = self.table, self.table.packing == "concat"
        return EncodingOptions(table.max_length, table.overlong, table.bad_rows, self.kind, joins)

    @property
    def source_names(self) -> list[str]:
        """Name of each source in messages."""
        return [f"data.train.{number} ({source.path})" for number, source in enumerate(self.table.train)]


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
        weights: For each source, how often an epoch uses each document. Empty if every weight is 1.
        content: Checksum of ``tokens``, ``trained`` and ``starts``. None or "" if it has not been computed.
        begins_row: For each document, whether it is the first document of a row. Most rows have only one document.
        in_use: Ascending indices of the documents to use, or None for all documents.
        images: Images of all documents, serialized by ``refs_to_bytes``.
        image_starts: Offset of each document's first byte in ``images``, followed by the length of ``images``.
        roles: Role of each document in its example, as defined by ``kind``. Empty if every role is 0.
        source_checksums: Returns one checksum per source. Reads only the files whose checksum is not cached.
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
        """Return a checksum of a document's tokens and loss mask. Teacher scores are stored under this key."""
        part = slice(int(self.starts[document]), int(self.starts[document + 1]))
        return checksum(self.tokens[part].tobytes() + self.trained[part].tobytes())

    def fingerprint(self) -> str:
        """Return a checksum of all data that a run uses. Read the tokens only if ``content`` is not set."""
        text = self.content_of_all
        if any(weight != 1.0 for weight in self.weights):
            text += f"-{checksum(repr((self.source_starts, self.weights)).encode())}"
        return text if self.in_use is None else f"{text}-{checksum(self.in_use.view(np.uint8))}"

    @cached_property
    def content_of_all(self) -> str:
        """Checksum of all documents, including those that are not in use."""
        return self.content or content_checksum(self.tokens, self.trained, self.starts)

    @property
    def largest_id(self) -> int:
        """Largest token id of any document."""
        return int(self.tokens.max()) if self.known_largest_id is None else self.known_largest_id

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return each document's number of tokens."""
        found: npt.NDArray[np.int64] = np.diff(self.starts) - self.kind.num_values
        return found

    def num_tokens_of(self, document: int) -> int:
        """Return a document's number of tokens."""
        return int(self.starts[document + 1] - self.starts[document]) - self.kind.num_values

    def images_of(self, document: int) -> list[ImageRef]:
        """Return a document's images, in order."""
        if not len(self.images):
            return []
        return refs_from_bytes(self.images[self.image_starts[document] : self.image_starts[document + 1]].tobytes())

    def release_pages(self) -> None:
        """Release the RAM that the memory-mapped files occupy. Reading the data again later is almost as fast.

        If this is never called, the process's resident memory grows with every read.
        """
        owners: list[object] = [getattr(self, name).base for name in ARRAYS]
        for mapped in owners:
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def epoch_documents(self, data_seed: int) -> npt.NDArray[np.int64]:
        """Return the documents of an epoch, in order. Each source is repeated according to its weight.

        For the fractional part of a weight, ``data_seed`` selects the same documents in every epoch. If an example has
        several documents, only its first document is returned.
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
            shuffled = np.random.default_rng((data_seed, _WEIGHT_STREAM, number)).permutation(len(documents))
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
    """Return the documents of all sources, in order. Tokenize them if they are not in the cache.

    The rows that ``data.val_size`` holds out are not in ``in_use``.

    Args:
        on_message: Called with the progress of a long tokenization, and with the reason if the cache is not used.

    Raises:
        DataError: ``rows_of`` or ``RowEncoder.encode_many`` failed, there is no token to train on, or
            ``data.cache_dir`` cannot be written.
        RowError: A row cannot be used for training and ``data.bad_rows`` is "error".
    """
    files = [source_files(source.path, source.subset, source.split) for source in data.table.train]

    def encode(writer: TokenWriter) -> tuple[DataReport, tuple[int, ...]]:
        return _encode_sources(data, tokenizer, files, writer, on_message)

    weights = tuple(source.weight for source in data.table.train)
    folder = cache_folder(data.table.cache_dir, on_message)
    cache = None
    if folder is None:
        dataset = _encode_in_memory(encode, data.kind)
    else:
        cache = TokenCache(folder, max_nbytes=data.table.max_cache_size, on_message=on_message)
        processor = data.image_processor(tokenizer)
        described = "" if processor is None else processor.describe()
        key = cache_key(data.table.train, files, tokenizer, data.table.train_on, data.encoding, cache, described)
        dataset = _dataset_from_entry(cache.get(key, encode), data.kind)
    dataset = replace(dataset, weights=weights, source_checksums=partial(source_checksums, files, cache))
    if data.table.val_size is not None:
        dataset = hold_out(dataset, data.table.val_size, data.seed)
    if not len(dataset.epoch_documents(data.seed)):
        raise DataError("data.train", "these weights leave no document to train on", "Raise data.train.0.weight")
    return dataset


def source_checksums(files: Sequence[Sequence[Path]], cache: TokenCache | None) -> tuple[str, ...]:
    """Return one checksum per source. It depends on its files' contents, suffixes and order, but not on their names.

    Args:
        cache: Cache of file checksums, or None to read all files.
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
    """Tokenize every source. Return the report and ``source_starts``."""
    rows = RowEncoder(tokenizer, train_on=data.table.train_on, images=data.image_processor(tokenizer))
    encoder = Encoder(rows, writer, data.encoding, _progress_callback(on_message))
    source_starts = [0]
    for source, paths in zip(data.table.train, files, strict=True):
        encoder.add_rows(rows_of(source, paths, data.kind))
        encoder.end_source()
        source_starts.append(writer.num_documents)
    return encoder.finish(), tuple(source_starts)


def _encode_in_memory(
    encode: Callable[[TokenWriter], tuple[DataReport, tuple[int, ...]]], kind: RowKind
) -> TokenDataset:
    made = InMemoryWriter()
    return made.dataset(*encode(made.writer), kind=kind)


class InMemoryWriter:
    """Writer that keeps its documents in RAM."""

    def __init__(self) -> None:
        self._files = {name: io.BytesIO() for name in ARRAYS}
        self.writer = TokenWriter(tuple(self._files.values()))

    def dataset(self, report: DataReport, source_starts: tuple[int, ...] = (), kind: RowKind = CHATS) -> TokenDataset:
        """Return a dataset of the documents written and flushed so far."""
        arrays = {name: np.frombuffer(file.getbuffer(), dtype=ARRAYS[name]) for name, file in self._files.items()}
        writer = self.writer
        return _dataset_from_entry(CacheEntry(arrays, report, source_starts, writer.content, writer.largest_id), kind)


def _dataset_from_entry(entry: CacheEntry, kind: RowKind) -> TokenDataset:
    return TokenDataset(
        **entry.arrays,
        report=entry.report,
        source_starts=entry.source_starts,
        content=entry.content,
        known_largest_id=entry.largest_id,
        kind=kind,
    )


def _progress_callback(on_message: OnMessage) -> Callable[[int], None]:
    """Return a callback that reports the number of tokenized rows, at most once in ten seconds."""
    reported = time.monotonic()

    def on_rows(count: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _SECONDS_BETWEEN_MESSAGES:
            reported = time.monotonic()
            on_message(f"tokenizing: {count:,} rows")

    return on_rows


def check_id_range(dataset: TokenDataset, num_embeddings: int, *, where: str) -> None:
    """Check that the model's input embedding has a row for every token id.

    Args:
        num_embeddings: Number of rows in the input embedding.
        where: Path of the tokenizer, for the error message.

    Raises:
        DataError: A token id has no embedding.
    """
    largest = dataset.largest_id
    if largest >= num_embeddings:
        raise DataError(
            where,
            f"this tokenizer produces the token id {largest}, but the model has only {num_embeddings} embeddings "
            "(vocab_size)",
            "Use the model's own tokenizer",
        )


#: Name of the held-out rows in metrics.
NAME = "val"
_HOLD_OUT_STREAM = 3  # index of this function's random stream; the loader and the weights use streams 0 to 2


def hold_out(dataset: TokenDataset, val_size: float, data_seed: int) -> TokenDataset:
    """Return a dataset without its held-out rows. :func:`held_out_part` returns the held-out rows.

    The choice of rows depends only on the data and ``data_seed``. All documents of a row are held out together.

    Args:
        val_size: If below 1, the fraction of rows to hold out (rounded, at least one row); else the number of rows.
            Dropped rows are not counted.

    Raises:
        DataError: No row would be left to train on.
    """
    row_of_document = np.cumsum(dataset.begins_row) - 1
    count = int(row_of_document[-1]) + 1
    wanted = max(1, round(val_size * count)) if val_size < 1 else int(val_size)
    if wanted >= count:
        shown = f"{wanted:,}" if val_size >= 1 else f"{val_size:g}"
        raise DataError(
            "data.val_size",
            f"data.val_size = {shown} leaves nothing to train on: the data has {count:,} row{'s' * (count > 1)}",
            "Lower it, or use separate rows in [[data.eval]]" if count > 1
            else "A text file is one row: use another text file in [[data.eval]]",
        )  # fmt: skip
    is_held_out = np.zeros(count, dtype=np.bool_)
    is_held_out[np.random.default_rng((data_seed, _HOLD_OUT_STREAM)).permutation(count)[:wanted]] = True
    return replace(dataset, in_use=np.flatnonzero(~is_held_out[row_of_document]))


def held_out_part(dataset: TokenDataset, max_samples: int | None = None) -> TokenDataset:
    """Return the rows that :func:`hold_out` removed, all with weight 1. Return at most ``max_samples`` rows."""
    assert dataset.in_use is not None
    others = np.ones(len(dataset), dtype=np.bool_)
    others[dataset.in_use] = False
    documents = np.flatnonzero(others)
    if max_samples is not None:
        documents = documents[np.cumsum(dataset.begins_row[documents]) <= max_samples]
    return replace(dataset, in_use=documents, weights=())


def describe(held_out: TokenDataset) -> str:
    """Return a message that states the number of held-out rows, documents and tokens."""
    documents = held_out.in_use
    assert documents is not None
    rows = int(np.count_nonzero(held_out.begins_row[documents]))
    tokens = int(held_out.lengths()[documents].sum())
    pieces = "" if rows == len(documents) else f"{len(documents):,} documents, "
    return f"{rows:,} row{'s' * (rows != 1)} held out from training (data.val_size), {pieces}{tokens:,} tokens"
