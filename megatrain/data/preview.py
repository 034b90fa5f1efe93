"""Preview of a config's data: rows as text with loss masks, and statistics of all rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatrain.data.chat import RowEncoder, TokenizedRow
from megatrain.data.dataset import DataSpec, OnMessage, load_dataset
from megatrain.data.formats import DataRow, Document, PlainRow
from megatrain.data.packing import pack_documents
from megatrain.data.row_order import epoch_order
from megatrain.data.rows_report import DataError, DataReport, EmptyFileError, RowError
from megatrain.data.shards import Shards
from megatrain.data.sources import parse_row, read_source, source_files
from megatrain.data.text_rows import CutDocument, TextCutter
from megatrain.data.token_dataset import TokenDataset, describe, held_out_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PERCENTILES = (0, 50, 90, 99, 100)
_MAX_PREVIEW_TOKENS = 4096  # maximum tokens shown per text; a text can be a whole book


@dataclass(frozen=True, slots=True)
class TextRun:
    """Text of adjacent tokens that have the same loss mask. Includes special tokens."""

    text: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class RowPreview:
    """One of a row's texts, as the model sees it. Other attributes are as in ``TokenizedRow``.

    Attributes:
        number: Row number, counted from 1 across all sources.
        where: File and row.
        kind: Title of the text, such as "conversation", "prompt and completion", "text" or "chosen".
        segments: The shown text, in order. Empty if the row cannot be tokenized.
        num_tokens: Number of tokens in the shown text.
        num_trained: Number of shown tokens that are in the loss.
        num_tokens_before: Number of tokens of the whole text.
        dropped: Reason why the row is not used for training, or "".
        num_pieces: Number of documents that the shown text is split into. Each begins with the start tokens.
        left_out: Fields of the row that the chat template does not render.
    """

    number: int
    where: str
    kind: str
    segments: tuple[TextRun, ...] = ()
    num_tokens: int = 0
    num_trained: int = 0
    num_tokens_before: int = 0
    dropped: str = ""
    untrained_turns: tuple[str, ...] = ()
    num_pieces: int = 1
    is_text: bool = False
    left_out: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the preview as a dict that JSON can represent."""
        return asdict(self)


def preview_rows(
    data: DataSpec, tokenizer: PreTrainedTokenizerFast, n: int = 3, row: int | None = None
) -> list[RowPreview]:
    """Preview the data's first ``n`` rows, or only row ``row``. Later rows are not read, and the cache is not used.

    Args:
        row: Row number, counted from 1 across all sources. Dropped rows are also counted.

    Raises:
        DataError: The data cannot be read, or there is no such row.
    """
    encoder = RowEncoder(tokenizer, train_on=data.table.train_on, image_processor=data.image_processor(tokenizer))
    start, stop = (1, n) if row is None else (row, row)
    if start < 1:
        raise DataError("--row", f"there is no row {row}", "The first row is row 1")
    numbered_rows = zip(itertools.count(1), _iter_rows(data), strict=False)
    previews = [
        preview
        for row_number, item in itertools.islice(numbered_rows, start - 1, stop)
        for preview in _preview_texts(data, tokenizer, encoder, row_number, item)
    ]
    if row is not None and not previews:
        count = sum(1 for _ in _iter_rows(data))
        raise DataError("--row", f"there is no row {row}", f"The data has {count:,} rows")
    return previews


def _iter_rows(data: DataSpec) -> Iterator[DataRow | RowError]:
    """Yield the rows of all sources, including rows that cannot be used for training."""
    for source in data.table.train:
        if data.table.streaming:
            shards = Shards(source.path)
            for location, value in itertools.chain.from_iterable(shards.rows(index, 0) for index in range(len(shards))):
                yield parse_row(value, location, data.kind.reader or source.format, source.column_names)
            continue
        for row in read_source(source, source_files(source.path, source.subset, source.split), data.kind):
            if not isinstance(row, EmptyFileError) and (not isinstance(row, Document) or row.is_start):
                yield row  # only the first piece of a long text


def _preview_texts(
    data: DataSpec, tokenizer: PreTrainedTokenizerFast, encoder: RowEncoder, row_number: int, item: DataRow | RowError
) -> Iterator[RowPreview]:
    """Yield a preview of each of a row's texts."""
    if isinstance(item, RowError):
        yield _preview_text(data, tokenizer, encoder, row_number, item, "row")
        return
    for text, title in zip(data.kind.texts_of(item), data.kind.titles_of(item), strict=True):
        yield _preview_text(data, tokenizer, encoder, row_number, text, title)


def _preview_text(
    data: DataSpec,
    tokenizer: PreTrainedTokenizerFast,
    encoder: RowEncoder,
    row_number: int,
    item: PlainRow | RowError,
    title: str,
) -> RowPreview:
    (tokenized,) = encoder.encode_many([item])
    if isinstance(tokenized, RowError):
        reason = str(tokenized).removeprefix(f"{tokenized.location}: ")
        return RowPreview(number=row_number, where=tokenized.location, kind=title, dropped=reason)
    pieces = _split_start(tokenized, data.table.max_length, encoder)
    tokens = [token for piece in pieces for token in piece.tokens]
    trained = [flag for piece in pieces for flag in piece.trained]
    return RowPreview(
        number=row_number,
        where="" if isinstance(item, RowError) else item.location,
        kind=title,
        segments=_decode_runs(tokenizer, tokens, trained),
        num_tokens=len(tokens),
        num_trained=sum(trained),
        num_tokens_before=len(tokenized.tokens),
        dropped=_drop_reason(data, tokenized, trained),
        untrained_turns=tokenized.untrained_turns,
        num_pieces=len(pieces),
        is_text=tokenized.is_text,
        left_out=tokenized.omitted_fields,
        special_tokens=tokenized.special_tokens,
    )


def _split_start(row: TokenizedRow, max_length: int, encoder: RowEncoder) -> Sequence[TokenizedRow | CutDocument]:
    """Split the start of a text into documents, as in training. Truncate other rows."""
    end = _MAX_PREVIEW_TOKENS if row.is_text else max_length
    start = replace(row, tokens=row.tokens[:end], trained=row.trained[:end], is_end=True)
    return list(TextCutter(max_length, encoder.start_tokens).cut(start)) if row.is_text else [start]


def _drop_reason(data: DataSpec, text: TokenizedRow, trained: list[bool]) -> str:
    if not text.is_text and len(text.tokens) > data.table.max_length and data.table.overlong != "truncate":
        return f"{len(text.tokens)} tokens are more than data.max_length = {data.table.max_length}"
    if any(image_range.start < data.table.max_length < image_range.stop for image_range in text.image_tokens):
        return f"data.max_length = {data.table.max_length} would truncate it within an image"
    if any(trained):
        return ""
    if not text.is_text and any(text.trained):
        return f"none of its first {data.table.max_length} tokens (data.max_length) would be trained"
    return "none of its tokens would be trained"


def _decode_runs(tokenizer: PreTrainedTokenizerFast, tokens: list[int], trained: list[bool]) -> tuple[TextRun, ...]:
    segments = []
    for is_trained, group in itertools.groupby(zip(tokens, trained, strict=True), key=lambda pair: pair[1]):
        ids = [token for token, _ in group]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        segments.append(TextRun(str(text), is_trained))
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Statistics of one ``[[data.train]]`` source, before its weight is applied."""

    path: str
    weight: float
    num_documents: int
    num_tokens: int
    num_trained_tokens: int


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Number of documents that have ``low`` to ``high`` tokens, inclusive."""

    low: int
    high: int
    num_documents: int


@dataclass(frozen=True, slots=True)
class DataStats:
    """Statistics of all training data.

    Attributes:
        report: Counts of all rows that were read, dropped and truncated, and of their tokens. Weights are not applied.
        percentiles: Document lengths in tokens, keyed by percentile: 0, 50, 90, 99 and 100.
        histogram: Number of documents by length. The bounds double up to ``data.max_length``.
        num_documents: Number of documents in an epoch. This and all later counts apply the sources' weights.
        num_tokens: Number of tokens in an epoch.
        num_trained_tokens: Number of tokens in the loss in an epoch.
        num_rows: Number of rows in an epoch. Without packing, every document is a row.
        num_steps: Number of optimizer steps in an epoch.
        padding_share: Fraction of tokens that are padding in the first epoch, 0 to 1.
        padding_share_other: The same fraction if ``data.packing`` had the opposite value.
        held_out: Summary of the rows held out by ``data.val_size``, or "". Only ``report`` includes these rows.
    """

    report: DataReport
    sources: tuple[SourceStats, ...]
    percentiles: dict[int, int]
    histogram: tuple[LengthBin, ...]
    num_documents: int
    num_tokens: int
    num_trained_tokens: int
    num_rows: int
    num_steps: int
    padding_share: float
    padding_share_other: float
    held_out: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as a dict that JSON can represent."""
        return asdict(self)


def dataset_stats(
    data: DataSpec,
    tokenizer: PreTrainedTokenizerFast,
    rows_per_step: int,
    micro_batch_rows: int,
    on_message: OnMessage = lambda text: None,
) -> DataStats:
    """Compute statistics of all training data. Use the cache if it has the data.

    Args:
        rows_per_step: Number of rows in an optimizer step.
        micro_batch_rows: Number of rows in a micro-batch. Must divide ``rows_per_step``.
        on_message: Called with the progress of a long tokenization.

    Raises:
        DataError: ``load_dataset`` failed, or the data is streamed.
    """
    if data.table.streaming:
        raise DataError(
            "data.streaming",
            "statistics of all rows need a pass over all data, but streams are read only as far as a run uses them",
            "Remove data.streaming and use local files",
        )
    dataset = load_dataset(data, tokenizer, on_message)
    documents = dataset.epoch_documents(data.seed)
    group_size = dataset.kind.num_documents
    documents = np.add.outer(documents, np.arange(group_size)).reshape(-1)
    all_lengths = dataset.lengths()
    lengths = all_lengths if dataset.in_use is None else all_lengths[dataset.in_use]
    epoch_lengths = all_lengths[documents]
    trained_counts = _count_trained(dataset)
    max_length = data.table.max_length
    num_packed = len(pack_documents(documents, epoch_lengths, max_length))
    packed_padding = 1.0 - int(epoch_lengths.sum()) / (num_packed * max_length)
    order = epoch_order(data.seed, 0, len(epoch_lengths) // group_size)
    example_lengths = epoch_lengths.reshape(-1, group_size).max(axis=1)[order]
    example_counts = rows_per_step // group_size, max(1, micro_batch_rows // group_size)
    unpacked_padding = 1.0 - int(epoch_lengths.sum()) / (group_size * _padded_tokens(example_lengths, *example_counts))
    packing = data.table.packing
    num_rows = num_packed if packing else len(documents)
    return DataStats(
        report=dataset.report,
        sources=tuple(_source_stats(data, dataset, trained_counts)),
        percentiles={percent: int(np.percentile(lengths, percent, method="nearest")) for percent in _PERCENTILES},
        histogram=_histogram(lengths, max_length),
        num_documents=len(documents),
        num_tokens=int(epoch_lengths.sum()),
        num_trained_tokens=int(trained_counts[documents].sum()),
        num_rows=num_rows,
        num_steps=-(-num_rows // rows_per_step),
        padding_share=packed_padding if packing else unpacked_padding,
        padding_share_other=unpacked_padding if packing else packed_padding,
        held_out="" if dataset.in_use is None else describe(held_out_part(dataset)),
    )


def _count_trained(dataset: TokenDataset) -> npt.NDArray[np.int64]:
    """Return the number of tokens in the loss for each document."""
    return np.add.reduceat(dataset.trained, dataset.starts[:-1], dtype=np.int64)


def _source_stats(data: DataSpec, dataset: TokenDataset, num_trained: npt.NDArray[np.int64]) -> Iterator[SourceStats]:
    for index, source in enumerate(data.table.train):
        documents = np.arange(dataset.source_starts[index], dataset.source_starts[index + 1])
        if dataset.in_use is not None:
            documents = np.intersect1d(documents, dataset.in_use, assume_unique=True)
        num_tokens = int(dataset.lengths()[documents].sum())
        yield SourceStats(source.path, source.weight, len(documents), num_tokens, int(num_trained[documents].sum()))


def _padded_tokens(lengths: npt.NDArray[np.int64], rows_per_step: int, micro_batch_rows: int) -> int:
    """Return the number of tokens in an epoch, including padding, if each row is one document.

    As in the loader, the rows of a step are assigned round-robin to its micro-batches.

    Args:
        lengths: Number of tokens in each document, in the epoch's order.
    """
    num_steps = -(-len(lengths) // rows_per_step)
    rows = np.zeros(num_steps * rows_per_step, dtype=np.int64)
    rows[: len(lengths)] = lengths
    micro_batches = rows.reshape(num_steps, micro_batch_rows, rows_per_step // micro_batch_rows)
    return int(micro_batches.max(axis=1).sum()) * micro_batch_rows


def _histogram(lengths: npt.NDArray[np.int64], max_length: int) -> tuple[LengthBin, ...]:
    bounds = itertools.takewhile(lambda bound: bound <= max_length, (1 << power for power in itertools.count()))
    edges = [*bounds, max_length + 1]
    counts, _ = np.histogram(lengths, bins=edges)
    return tuple(
        LengthBin(low, high - 1, int(count))
        for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True)
        if count
    )
