"""Loading of training data, by default into memory-mapped files, so that RAM use does not grow with the data."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.cache import TokenCache, cache_folder, cache_key, read_checksum
from megatrain.data.chat import RowEncoder
from megatrain.data.collate import Collator
from megatrain.data.encoding import ARRAYS, Encoder, EncodingOptions, TokenWriter, pad_token_id
from megatrain.data.files import suffix_of
from megatrain.data.images import ImageProcessor
from megatrain.data.packing import BatchShape
from megatrain.data.row_kind import CHATS, RowKind
from megatrain.data.rows_report import DataError, DataReport
from megatrain.data.sources import read_source, source_files
from megatrain.data.token_dataset import TokenDataset, hold_out
from tiered import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.scores import TeacherScores
    from megatrain.data.table import DataConfig


_MESSAGE_INTERVAL_S = 10.0
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
        """Return a copy in which these keys of ``table`` are changed."""
        return replace(self, table=self.table.model_copy(update=keys))

    def image_processor(self, tokenizer: PreTrainedTokenizerFast) -> ImageProcessor | None:
        """Return the image processor, or None if ``images_folder`` is None. Raises the errors of its constructor."""
        if self.images_folder is None:
            return None
        return ImageProcessor(self.images_folder, tokenizer, self.table.max_length)

    def batch_shape(self, micro_batch_size: int, num_micro_batches: int) -> BatchShape:
        """Return the shape of a step with these numbers of micro-batches and rows per micro-batch."""
        return BatchShape(micro_batch_size, num_micro_batches, self.table.max_length, bool(self.table.packing))

    def collator(
        self, shape: BatchShape, tokenizer: PreTrainedTokenizerFast, teacher: TeacherScores | None = None
    ) -> Collator:
        """Return a collator for this data. Raises the errors of :meth:`image_processor`."""
        return Collator(shape, pad_token_id(tokenizer), self.image_processor(tokenizer), teacher)

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
        return [f"data.train.{index} ({source.path})" for index, source in enumerate(self.table.train)]


def load_dataset(
    data: DataSpec, tokenizer: PreTrainedTokenizerFast, on_message: OnMessage = lambda text: None
) -> TokenDataset:
    """Return the documents of all sources, in order. Tokenize them if they are not in the cache.

    In the result, ``in_use`` excludes the rows that ``data.val_size`` holds out.

    Args:
        on_message: Called with the progress of a long tokenization, and with the reason if the cache is not used.

    Raises:
        DataError: ``read_source`` or ``RowEncoder.encode_many`` failed, there is no token to train on, or
            ``data.cache_dir`` cannot be written.
        RowError: A row cannot be used for training and ``data.bad_rows`` is "error".
    """
    files = [source_files(source.path, source.subset, source.split) for source in data.table.train]
    encode = partial(_encode_sources, data, tokenizer, files, on_message)
    weights = tuple(source.weight for source in data.table.train)
    folder = cache_folder(data.table.cache_dir, on_message)
    cache = None
    if folder is None:
        memory_writer = InMemoryWriter()
        dataset = memory_writer.dataset(*encode(memory_writer.writer))
    else:
        cache = TokenCache(folder, max_nbytes=data.table.max_cache_size, on_message=on_message)
        processor = data.image_processor(tokenizer)
        description = "" if processor is None else processor.describe()
        key = cache_key(data.table.train, files, tokenizer, data.table.train_on, data.encoding, cache, description)
        dataset = cache.get(key, encode)
    dataset = replace(
        dataset, kind=data.kind, weights=weights, source_checksums=partial(source_checksums, files, cache)
    )
    if data.table.val_size is not None:
        dataset = hold_out(dataset, data.table.val_size, data.seed)
    if not len(dataset.epoch_documents(data.seed)):
        raise DataError("data.train", "these weights leave no document to train on", "Raise data.train.0.weight")
    return dataset


def source_checksums(files: Sequence[Sequence[Path]], cache: TokenCache | None) -> tuple[str, ...]:
    """Return one checksum per source. It covers the contents, suffixes and order of the files, but not their names.

    Args:
        cache: Cache of file checksums, or None to read all files.
    """
    file_checksum = read_checksum if cache is None else cache.file_checksum
    texts = ("\n".join(f"{suffix_of(file)} {file_checksum(file)}" for file in paths) for paths in files)
    return tuple(checksum(text.encode()) for text in texts)


def _encode_sources(
    data: DataSpec,
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[Sequence[Path]],
    on_message: OnMessage,
    writer: TokenWriter,
) -> tuple[DataReport, tuple[int, ...]]:
    """Tokenize every source. Return the report and ``source_starts``."""
    rows = RowEncoder(tokenizer, train_on=data.table.train_on, image_processor=data.image_processor(tokenizer))
    encoder = Encoder(rows, writer, data.encoding, _progress_callback(on_message))
    source_starts = [0]
    for source, paths in zip(data.table.train, files, strict=True):
        encoder.add_rows(read_source(source, paths, data.kind))
        encoder.end_source()
        source_starts.append(writer.num_documents)
    return encoder.finish(), tuple(source_starts)


class InMemoryWriter:
    """Writer that keeps its documents in RAM."""

    def __init__(self) -> None:
        self._files = {name: io.BytesIO() for name in ARRAYS}
        self.writer = TokenWriter(tuple(self._files.values()))

    def dataset(self, report: DataReport, source_starts: tuple[int, ...] = (), kind: RowKind = CHATS) -> TokenDataset:
        """Return a dataset of the documents written and flushed so far."""
        arrays: dict[str, Any] = {"content_checksum": self.writer.checksum, "known_largest_id": self.writer.largest_id}
        for name, file in self._files.items():
            arrays[name] = np.frombuffer(file.getbuffer(), dtype=ARRAYS[name])
        return TokenDataset(**arrays, report=report, source_starts=source_starts, kind=kind)


def _progress_callback(on_message: OnMessage) -> Callable[[int], None]:
    """Return a callback that reports the number of tokenized rows, at most once every ten seconds."""
    last_report = time.monotonic()

    def on_rows(count: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report >= _MESSAGE_INTERVAL_S:
            last_report = time.monotonic()
            on_message(f"tokenizing: {count:,} rows")

    return on_rows


def check_id_range(dataset: TokenDataset, num_embeddings: int, *, location: str) -> None:
    """Check that the model's input embedding has a row for every token id.

    Args:
        num_embeddings: Number of rows in the input embedding.
        location: Path of the tokenizer, for the error message.

    Raises:
        DataError: A token id has no embedding.
    """
    largest_id = dataset.largest_id
    if largest_id >= num_embeddings:
        raise DataError(
            location,
            f"this tokenizer produces the token id {largest_id}, but the model has only {num_embeddings} embeddings "
            "(vocab_size)",
            "Use the model's own tokenizer",
        )
