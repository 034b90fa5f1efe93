"""Windows of a stream: rows that are drawn from the sources, encoded, assigned to batch rows and shuffled together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatrain.data.chat import RowEncoder
from megatrain.data.dataset import InMemoryWriter, check_id_range
from megatrain.data.encoding import Encoder, EncodingOptions
from megatrain.data.formats import DataRow
from megatrain.data.packing import BatchShape
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.shards import RowStream, SourceCursor
from megatrain.data.stream import StreamDataset
from megatrain.data.table import weights_at
from megatrain.data.token_dataset import TokenDataset

#: Indices of random streams. ``row_order`` and ``token_dataset`` use streams 0 to 3.
_SHARD_STREAM, _ROW_STREAM, _ORDER_STREAM = 4, 5, 6
#: Maximum numbers of rows and characters in a window. All rows of a window are in RAM.
WINDOW_ROWS = 4096
WINDOW_CHARACTERS = 1 << 24
_ROWS_PER_DRAW = 512


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a run in its streams: the loader's complete state in a checkpoint.

    Attributes:
        window: Number of the current window, counted from 0.
        step: Step that uses the window's first row, counted from 0.
        place: Index of the window's first row in that step.
        used: Number of the window's rows that have been used.
        sources: Position in each source before the window.
    """

    window: int
    step: int
    place: int
    used: int
    sources: tuple[SourceCursor, ...]

    @classmethod
    def start(cls, num_sources: int) -> Cursor:
        """Return the position before the first row."""
        return cls(0, 0, 0, 0, tuple(SourceCursor() for _ in range(num_sources)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cursor:
        """Create a cursor from the output of :meth:`to_json`."""
        return cls(**{**values, "sources": tuple(SourceCursor(**entry) for entry in values["sources"])})

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as a dict that checkpoints store. Its keys must never change."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows that are drawn and encoded as a group.

    Attributes:
        cursor: Position in the streams before the window.
        end_cursors: Position in each source after the window.
        rows: Documents of each batch row, in the order in which the rows are used.
        first_ends: For each source that first reaches its end in this window, the approximate batch row of its restart.
    """

    cursor: Cursor
    end_cursors: tuple[SourceCursor, ...]
    dataset: TokenDataset
    rows: Sequence[Sequence[int]]
    first_ends: Mapping[int, int]

    def next_cursor(self, rows_per_step: int) -> Cursor:
        """Return the cursor of the next window."""
        step, place = divmod(self.cursor.place + len(self.rows), rows_per_step)
        return Cursor(self.cursor.window + 1, self.cursor.step + step, place, 0, self.end_cursors)


@dataclass(frozen=True, slots=True, eq=False)
class WindowMaker:
    """Factory for windows of streamed rows. A window depends only on these attributes and its cursor.

    Attributes:
        data_seed: Random seed for the order of shards, documents and rows.
        num_embeddings: Number of token embeddings in the model.
    """

    streams: StreamDataset
    shape: BatchShape
    data_seed: int
    num_embeddings: int

    def make(self, cursor: Cursor) -> Window:
        """Draw, encode, pack and shuffle the rows of the window at a cursor.

        Raises:
            DataError: A shard cannot be read, no token would be trained, or a token id has no embedding.
        """
        drafts, rows_left = self._open_sources(cursor)
        try:
            num_rows = _fill(drafts, rows_left, self.shape.max_length if self.shape.packing else None)
        finally:
            for draft in drafts:
                draft.stream.close()
        dataset = _join_drafts(drafts, num_rows)
        check_id_range(dataset, self.num_embeddings, location=str(self.streams.tokenizer.name_or_path))
        documents = self._random(_ROW_STREAM, cursor.window).permutation(len(dataset))
        table = self.shape.assign(documents, dataset)
        order = self._random(_ORDER_STREAM, cursor.window).permutation(len(table))
        ends = {index: draft.first_end for index, draft in enumerate(drafts) if draft.first_end is not None}
        first_ends = {index: int(count / num_rows * len(table)) for index, count in ends.items()}
        return Window(cursor, tuple(draft.cursor for draft in drafts), dataset, [table[i] for i in order], first_ends)

    def _open_sources(self, cursor: Cursor) -> tuple[list[_SourceDraft], int | None]:
        """Open all sources at a cursor. Return drafts, and the number of batch rows until weights change, or None."""
        data, streams = self.streams.data, self.streams
        weights, change_step = weights_at(data.table.train, cursor.step)
        rows_left = None
        if change_step is not None:
            rows_left = (change_step - cursor.step) * self.shape.examples_per_step(1) - cursor.place
        rows = RowEncoder(streams.tokenizer, train_on=data.table.train_on)
        drafts = []
        for index, weight in enumerate(weights):
            seed, source_cursor = (self.data_seed, _SHARD_STREAM, index), cursor.sources[index]
            stream = RowStream(data.table.train[index], streams.streams[index], seed, source_cursor, streams.on_message)
            drafts.append(_SourceDraft(stream, weight / sum(weights), rows, data.encoding))
        return drafts, rows_left

    def _random(self, stream: int, window: int) -> np.random.Generator:
        return np.random.default_rng((self.data_seed, stream, window))


class _SourceDraft:
    """A source's part of a window that is being built.

    Args:
        share: Fraction of all rows that the source provides.

    Attributes:
        credit: Number of rows by which the source is behind its share.
        first_end: Number of rows in the window when the source first reached its end, or None if this has not happened.
    """

    def __init__(self, stream: RowStream, share: float, rows: RowEncoder, options: EncodingOptions) -> None:
        self.stream, self.share, self.credit = stream, share, stream.cursor.credit
        self.first_end: int | None = None
        self.memory = InMemoryWriter()
        self.encoder = Encoder(rows, self.memory.writer, options)
        self._drawn_rows: list[DataRow | RowError] = []

    @property
    def cursor(self) -> SourceCursor:
        """Current position in the source."""
        return replace(self.stream.cursor, credit=self.credit)

    def draw(self, num_rows: int) -> int:
        """Draw the source's next row. Return the row's number of characters.

        Args:
            num_rows: Number of rows that the window already has.
        """
        turn, row = self.stream.cursor.turn, self.stream.next_row()
        if turn == 0 < self.stream.cursor.turn:
            self.first_end = num_rows
        self._drawn_rows.append(row)
        return 0 if isinstance(row, RowError) else row.num_characters

    def encode(self) -> None:
        """Encode the rows drawn since the last call."""
        self.encoder.add_rows(self._drawn_rows)
        self._drawn_rows = []


def _fill(drafts: Sequence[_SourceDraft], rows_left: int | None, row_tokens: int | None) -> int:
    """Draw and encode rows until the window is full or the weights change. Return the number of drawn rows.

    Before each draw, one credit is divided among the sources by weight. The source with the most credit provides the
    row and pays one credit. Each source's number of rows therefore stays within one row of its share.

    Args:
        rows_left: Number of batch rows before the weights change, or None if they do not change.
        row_tokens: Number of tokens in a packed row, or None if each row contains one document.
    """
    num_rows = num_characters = 0
    while num_rows < WINDOW_ROWS and num_characters < WINDOW_CHARACTERS:
        count = min(_ROWS_PER_DRAW, WINDOW_ROWS - num_rows)
        if rows_left is not None:
            num_made, num_needed = sum(draft.memory.writer.num_documents for draft in drafts), rows_left
            if row_tokens is not None:
                num_made, num_needed = sum(draft.memory.writer.num_tokens for draft in drafts), rows_left * row_tokens
            if num_made >= num_needed:
                break
            per_row = max(1.0, num_made / num_rows) if num_rows else float(row_tokens or 1)
            count = max(1, min(count, int((num_needed - num_made) / per_row)))
        for _ in range(count):
            for draft in drafts:
                draft.credit += draft.share
            next_draft = max(drafts, key=lambda draft: (draft.share > 0, draft.credit))
            next_draft.credit -= 1.0
            if not threading.main_thread().is_alive():
                raise DataError("data.train", "the program is exiting and needs no more rows")
            num_characters += next_draft.draw(num_rows)
            num_rows += 1
            if num_characters >= WINDOW_CHARACTERS:
                break
        for draft in drafts:
            draft.encode()
    for draft in drafts:
        draft.encoder.end_source()
    return num_rows


def _join_drafts(drafts: Sequence[_SourceDraft], num_rows: int) -> TokenDataset:
    """Return the documents of all rows, sorted by source. Raises DataError if there is no token to train on."""
    parts = [draft.memory.dataset(draft.encoder.report()) for draft in drafts]
    first_error = next((draft.encoder.counts.first_error for draft in drafts if draft.encoder.counts.first_error), None)
    if not any(map(len, parts)):
        raise DataError(
            "data.train",
            f"no token of {num_rows:,} consecutive rows would be trained",
            "Check data.train_on and data.max_length" if first_error is None else f"The first error: {first_error}",
        )
    dataset, _ = join_rows((part, range(len(part))) for part in parts)
    report = replace(
        parts[0].report,
        num_rows=sum(part.report.num_rows for part in parts),
        sources=tuple(part.report.sources[0] for part in parts),
        dropped=tuple(count for part in parts for count in part.report.dropped),
        left_out=tuple(count for part in parts for count in part.report.left_out),
    )
    return replace(dataset, report=report, known_largest_id=max(part.largest_id for part in parts if len(part)))


def join_rows(rows: Iterable[tuple[TokenDataset, Sequence[int]]]) -> tuple[TokenDataset, list[list[int]]]:
    """Join the documents of rows from several datasets. Return the joined dataset, and each row's documents in it."""
    joined_rows: list[list[int]] = []
    spans: list[tuple[TokenDataset, slice]] = []
    for dataset, documents in rows:
        joined_rows.append(list(range(len(spans), len(spans) + len(documents))))
        spans += [(dataset, slice(*dataset.starts[document : document + 2].tolist())) for document in documents]
    starts = np.cumsum([0, *(part.stop - part.start for _, part in spans)], dtype=np.int64)
    tokens = np.concatenate([np.empty(0, dtype=np.int32), *(dataset.tokens[part] for dataset, part in spans)])
    trained = np.concatenate([np.empty(0, dtype=np.bool_), *(dataset.trained[part] for dataset, part in spans)])
    return TokenDataset(tokens, trained, starts, spans[0][0].report), joined_rows
