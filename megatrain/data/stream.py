"""Training rows that are read during the run: no first pass, no cache, a cursor in each checkpoint.

Rows are drawn from the sources one by one, by weight, and collected in windows, limited by `WINDOW_ROWS` and
`WINDOW_CHARACTERS`. A window is encoded, packed and shuffled like a whole data set (`dataset.py`, `packing.py`). Its
rows are used step by step. So the batches are a function of the shards, the seed and the cursor: the position of each
source at the start of the window, and the number of rows used since. A checkpoint stores nothing else. Every rank draws
the same rows, for any number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass, replace
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.cache import TokenCache, cache_folder
from megatrain.data.chat import RowEncoder
from megatrain.data.dataset import (
    DataSpec,
    InMemory,
    OnMessage,
    TokenDataset,
    check_ids,
    load_dataset,
    source_checksums,
)
from megatrain.data.encoding import Encoder
from megatrain.data.formats import DataRow
from megatrain.data.loader import BatchLoader, LoaderPosition, StepBatch
from megatrain.data.packing import pack_documents
from megatrain.data.row_kind import RowKind
from megatrain.data.rows_report import DataError, DataReport, RowError, SourceCounts, check_losses
from megatrain.data.shards import ShardError, Shards
from megatrain.data.sources import is_hub_name, row_or_error, source_files
from megatrain.data.table import weights_at
from tiered import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.table import DataConfig, DatasetConfig

__all__ = [
    "StreamDataset",
    "StreamLoader",
    "changed_sources",
    "open_dataset",
    "open_stream",
    "refuse_streams",
    "rows_in_order",
]

#: Random streams; the loader, weights and held-out rows have others.
_SHARDS, _ROWS, _ORDER = 4, 5, 6
#: Maximum rows and characters of a window, which is tokenized at once and held in RAM.
WINDOW_ROWS = 4096
WINDOW_CHARACTERS = 1 << 24
#: Attempts to open a shard before a server error ends the run.
NUM_TRIES = 5
_FIRST_PAUSE_S = 0.5
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class SourceCursor:
    """Position of a source.

    Attributes:
        turn: number of times that the source has been read to its end.
        shard: number of the shard in the order of this turn.
        row: rows of the shard that have been drawn.
        credit: rows that the source may draw before others; see ``_draw``.
    """

    turn: int = 0
    shard: int = 0
    row: int = 0
    credit: float = 0.0


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a run in its streams. A checkpoint stores nothing else.

    Attributes:
        step: step that uses the first row of the window, from 0.
        place: number of that row within its step.
        used: rows of the window that have been used.
        sources: position of each source before the window.
    """

    window: int
    step: int
    place: int
    used: int
    sources: tuple[SourceCursor, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cursor:
        """Return the cursor from its ``asdict`` in a checkpoint."""
        return cls(**{**values, "sources": tuple(SourceCursor(**each) for each in values["sources"])})


@dataclass(frozen=True)
class _Window:
    """Rows that were drawn together.

    Attributes:
        cursor: position of the streams before the window.
        after: position of each source after the window.
        rows: documents of each trained row, in the order of their use.
        first_ends: source -> first row of the window that repeats the source, if its first turn ends in this window.
    """

    cursor: Cursor
    after: tuple[SourceCursor, ...]
    dataset: TokenDataset
    rows: list[npt.NDArray[np.int64]]
    first_ends: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class StreamReport(DataReport):
    """Facts about streams that are known before reading them."""

    text: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class StreamDataset(TokenDataset):
    """Sources that are read during the run. As a data set it has no documents.

    Attributes:
        on_message: Called with messages for the user.
    """

    data: DataSpec
    tokenizer: PreTrainedTokenizerFast
    streams: tuple[Shards, ...]
    on_message: OnMessage

    def fingerprint(self) -> str:
        """Return a checksum of the sources and options: names and sizes of shards, but not their contents."""
        data = self.data
        keys = ("format", "columns", "weight", "weight_from_step")
        sources = [
            {key: getattr(source, key) for key in keys} | {"shards": shards.describe()}
            for source, shards in zip(data.table.train, self.streams, strict=True)
        ]
        tokenizer = checksum(self.tokenizer.backend_tokenizer.to_str().encode())
        template = checksum(str(self.tokenizer.chat_template).encode())
        what = (sources, data.table.train_on, data.encoding, data.seed, tokenizer, template)
        return f"stream-{checksum(repr(what).encode())}"


def open_dataset(
    data: DataSpec, tokenizer: PreTrainedTokenizerFast, on_message: OnMessage = lambda text: None
) -> TokenDataset:
    """Return the rows of a run: opened streams, or the result of ``load_dataset``.

    Raises:
        DataError: raised by ``open_stream`` or ``load_dataset``.
    """
    opened = open_stream if data.table.streaming else load_dataset
    return opened(data, tokenizer, on_message)


def open_stream(data: DataSpec, tokenizer: PreTrainedTokenizerFast, on_message: OnMessage) -> StreamDataset:
    """Return the sources of a run as streams; lists their shards and reads none.

    Raises:
        DataError: a source has no readable shards.
    """
    streams = tuple(Shards(source.path) for source in data.table.train)
    shown = ", ".join(f"{len(shards):,} shard{'s' * (len(shards) != 1)} of {shards.path}" for shards in streams)
    counts = tuple(SourceCounts() for _ in streams)
    text = f"streamed during the run: {shown}"
    report = StreamReport(0, 0, 0, 0, 0, 0, 0, sources=counts, text=text)
    return StreamDataset(
        np.empty(0, dtype=np.int32),
        np.empty(0, dtype=np.bool_),
        np.zeros(1, dtype=np.int64),
        report,
        known_largest_id=0,
        kind=data.kind,
        source_checksums=lambda: tuple(map(_checksum_of_shards, streams)),
        data=data,
        tokenizer=copy.deepcopy(tokenizer),  # for the window thread
        streams=streams,
        on_message=on_message,
    )


def _checksum_of_shards(shards: Shards) -> str:
    return checksum(repr(shards.describe()).encode())


def changed_sources(table: DataConfig, before: Sequence[str]) -> list[str]:
    """Return a line for each source whose file contents have changed. Tokenizes nothing.

    A source that cannot be read gets a line with the reason. Hub data sets are skipped, because reading them would
    fetch them.

    Args:
        table: ``[data]``, with the `streaming` of the earlier start.
        before: Earlier results of ``TokenDataset.source_checksums``. Empty if none were recorded.
    """
    if before and len(before) != len(table.train):
        return [f"data.train: the number of sources: {len(before)} -> {len(table.train)}"]
    folder = None
    with contextlib.suppress(DataError):  # without a cache the files are read
        folder = None if table.streaming else cache_folder(table.cache_dir, lambda text: None)
    cache = None if folder is None else TokenCache(folder)
    lines = []
    for number, (source, old) in enumerate(zip(table.train, before, strict=False)):
        if not table.streaming and is_hub_name(source.path):
            continue
        try:
            if table.streaming:
                new = _checksum_of_shards(Shards(source.path))
            else:
                (new,) = source_checksums([source_files(source.path, source.subset, source.split)], cache)
        except (DataError, OSError) as error:
            lines.append(f"data.train.{number}: cannot be compared: {error}")
            continue
        if new != old:
            what = "the shards have other names or sizes" if table.streaming else "the files have other contents"
            lines.append(f"data.train.{number}: {what} ({source.path})")
    return lines


def refuse_streams(data: DataSpec, what: str) -> None:
    """Raise ``DataError`` if the data is streamed, for operations that need all rows."""
    if data.table.streaming:
        raise DataError(
            "data.streaming",
            f"{what} take a pass over all of the data, and streams are read only as far as a run comes",
            "Leave data.streaming out, and name files that are here",
        )


def rows_in_order(source: DatasetConfig, kind: RowKind) -> Iterator[DataRow | RowError]:
    """Yield the rows of a source shard by shard, in sorted order, reading only on demand."""
    shards = Shards(source.path)
    for index in range(len(shards)):
        for where, value in shards.rows(index, 0):
            yield row_or_error(value, where, kind.reader or source.format, source.their_columns)


class StreamLoader(BatchLoader):
    """Loader of streamed rows; the steps do not depend on the rank or on the cursor of a resume.

    A thread prepares the next window during training on the current one. A source that ends begins again, with its
    shards in another order.

    Args:
        max_steps: steps of the run, used as the length of an epoch, because the real length is unknown.
        num_embeddings: number of token embeddings in the model.
        arguments: arguments of ``BatchLoader``.
    """

    def __init__(self, dataset: StreamDataset, *, max_steps: int, num_embeddings: int, **arguments: Any) -> None:
        self._streams, self._max_steps, self._num_embeddings = dataset, max_steps, num_embeddings
        self._said: set[str] = set()
        super().__init__(dataset, **arguments)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the run."""
        return self._max_steps

    def fingerprint(self) -> str:
        """Return a checksum of the sources and options."""
        return self._streams.fingerprint()

    def seek(self, position: LoaderPosition) -> None:
        """Continue from ``position``: reads its shards up to there, and encodes one window again."""
        self._position = position
        start = Cursor(0, 0, 0, 0, tuple(SourceCursor() for _ in self._streams.streams))
        if position.cursor is not None:
            start = Cursor.from_json(position.cursor)
        self._cursor = start
        self._window: _Window | None = None
        self._makes: Future[_Window] | None = None
        self._counts = [SourceCounts() for _ in self._streams.streams]

    def __next__(self) -> StepBatch:
        rows_per_step = self._micro_batch_size * self._num_micro_batches
        parts: list[tuple[TokenDataset, npt.NDArray[np.int64]]] = []
        while len(parts) < rows_per_step:
            window = self._current()
            left = window.rows[self._cursor.used :][: rows_per_step - len(parts)]
            parts += [(window.dataset, row) for row in left]
            self._report_ends(window, range(self._cursor.used, self._cursor.used + len(left)))
            self._cursor = replace(self._cursor, used=self._cursor.used + len(left))
            if self._cursor.used == len(window.rows) and len(parts) < rows_per_step:
                self._begin_next(window)
        self._dataset, rows = _joined(parts)
        micro_batches = [
            self.micro_batch(rows[first :: self._num_micro_batches]) for first in range(self._num_micro_batches)
        ]
        step = self._position.step + 1
        self._position = LoaderPosition(self._position.epoch, step, asdict(self._cursor))
        return StepBatch(
            micro_batches,
            num_real_tokens=int(self._dataset.starts[-1]),
            num_trained_tokens=sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in micro_batches),
            epoch=self._position.epoch,
            position=self._position,
        )

    @property
    def dataset(self) -> TokenDataset:
        """The sources."""
        return self._streams

    # -- windows -----------------------------------------------------------------------------------------------------

    def _current(self) -> _Window:
        """Return the window of the cursor."""
        if self._window is None:
            making = self._makes or _start(self._make, replace(self._cursor, used=0))
            self._window, self._makes = making.result(), None
            self._report(self._window)
            rows_left = len(self._window.rows) - self._cursor.used
            rows_needed = (self._max_steps - self._position.step) * self._micro_batch_size * self._num_micro_batches
            if rows_needed > rows_left:
                self._makes = _start(self._make, self._after(self._window))
        return self._window

    def _begin_next(self, window: _Window) -> None:
        self._cursor, self._window = self._after(window), None

    def _after(self, window: _Window) -> Cursor:
        """Return the cursor of the window after ``window``."""
        rows_per_step = self._micro_batch_size * self._num_micro_batches
        step, place = divmod(window.cursor.place + len(window.rows), rows_per_step)
        return Cursor(window.cursor.window + 1, window.cursor.step + step, place, 0, window.after)

    def _make(self, cursor: Cursor) -> _Window:
        """Draw the rows of a window; encode, pack and shuffle them."""
        drawing = _WindowDraft(self._streams, cursor, self._data_seed)
        rows_left = None
        if drawing.until is not None:
            rows_left = (drawing.until - cursor.step) * self._micro_batch_size * self._num_micro_batches - cursor.place
        try:
            drawing.fill(rows_left, self._max_length if self._packing else None)
        finally:
            drawing.close()
        dataset = drawing.dataset()
        check_ids(dataset, self._num_embeddings, where=str(self._streams.tokenizer.name_or_path))
        documents = np.random.default_rng((self._data_seed, _ROWS, cursor.window)).permutation(len(dataset))
        members, starts = documents, np.arange(len(documents) + 1)
        if self._packing:
            members, starts = pack_documents(documents, dataset.lengths()[documents], self._max_length)
        order = np.random.default_rng((self._data_seed, _ORDER, cursor.window)).permutation(len(starts) - 1)
        rows = [members[starts[row] : starts[row + 1]] for row in order]
        first_ends = {number: int(share * len(rows)) for number, share in drawing.first_ends.items()}
        return _Window(cursor, drawing.after, dataset, rows, first_ends)

    def _report_ends(self, window: _Window, used: range) -> None:
        """Report the sources that these used rows complete for the first time; drawing runs ahead of use."""
        for number, at in window.first_ends.items():
            if at in used:
                name = self._streams.data.source_names[number]
                self._streams.on_message(
                    f"{name} has been read to its end, and begins again with its shards in another order"
                )

    def _report(self, window: _Window) -> None:
        """Warn if much of a window is dropped, or if its chat template omits fields.

        Raises:
            DataError: more than ``data.max_dropped`` of a source is dropped or cut.
        """
        data, report = self._streams.data, window.dataset.report
        said: list[tuple[str, str]] = []
        counts = zip(self._counts, report.sources, strict=True)
        self._counts = [SourceCounts(*map(add, astuple(before), astuple(now))) for before, now in counts]
        why = f" (first: {report.dropped[0].example}: {report.dropped[0].reason})" if report.dropped else ""
        for name, total in zip(data.source_names, self._counts, strict=True):
            losses = check_losses(replace(report, sources=(total,)), [name], data.table.max_dropped)
            said += [(f"losses of {name}", f"warning: {text}{why}") for text in losses]
        said += [("fields", f"warning: {text}") for severity, text in report.remarks() if severity == "warning"]
        for what, text in said:
            if what not in self._said:
                self._said.add(what)
                self._streams.on_message(text)


class _WindowDraft:
    """The rows of one window, drawn and encoded.

    Args:
        cursor: position of the streams.
        data_seed: determines the order of shards.

    Attributes:
        until: the step at which the weights change; None if they never do.
    """

    def __init__(self, streams: StreamDataset, cursor: Cursor, data_seed: int) -> None:
        data, self._streams = streams.data, streams
        weights, self.until = weights_at(data.table.train, cursor.step)
        self._shares = [weight / sum(weights) for weight in weights]
        self._credits = [at.credit for at in cursor.sources]
        self._readers = [
            _RowStream(source, shards, (data_seed, _SHARDS, number), at, streams.on_message)
            for number, (source, shards, at) in enumerate(
                zip(data.table.train, streams.streams, cursor.sources, strict=True)
            )
        ]
        rows = RowEncoder(streams.tokenizer, train_on=data.table.train_on)
        self._made = [InMemory() for _ in self._readers]
        self._encoders = [Encoder(rows, made.writer, data.encoding) for made in self._made]
        self._num_rows = self._num_characters = 0
        self._first_ends: dict[int, int] = {}

    @property
    def first_ends(self) -> dict[int, float]:
        """Return the sources whose first turn ends here, each with the share of the rows drawn before."""
        return {number: count / self._num_rows for number, count in self._first_ends.items()}

    @property
    def after(self) -> tuple[SourceCursor, ...]:
        """Current position of each source."""
        return tuple(
            replace(reader.at, credit=credit) for reader, credit in zip(self._readers, self._credits, strict=True)
        )

    def fill(self, rows_left: int | None, row_tokens: int | None) -> None:
        """Draw until the window is full, or has the rows that remain before the weights change.

        Args:
            rows_left: batch rows before the change; None if the weights do not change.
            row_tokens: tokens of a packed row; None if each document is a row.
        """
        while self._num_rows < WINDOW_ROWS and self._num_characters < WINDOW_CHARACTERS:
            count = min(_ROWS_AT_ONCE, WINDOW_ROWS - self._num_rows)
            if rows_left is not None:
                made, needed = self._num_documents, rows_left
                if row_tokens is not None:
                    made, needed = self._num_tokens, rows_left * row_tokens
                if made >= needed:
                    break
                a_row = max(1.0, made / self._num_rows) if self._num_rows else float(row_tokens or 1)
                count = max(1, min(count, int((needed - made) / a_row)))
            self._draw(count)
        for encoder in self._encoders:
            encoder.end_source()

    def _draw(self, count: int) -> None:
        """Draw rows and encode them.

        Each row comes from the source with the most credit. Before a draw every source gains its share of a row; the
        drawing source then pays one. So the rows drawn from each source match its weight to within one row.
        """
        drawn: list[list[DataRow | RowError]] = [[] for _ in self._readers]
        for _ in range(count):
            for number, share in enumerate(self._shares):
                self._credits[number] += share
            number = max(range(len(drawn)), key=lambda each: (self._shares[each] > 0, self._credits[each], -each))
            self._credits[number] -= 1.0
            if not threading.main_thread().is_alive():
                raise DataError("data.train", "the program ends and needs no more rows")
            turn = self._readers[number].at.turn
            row = self._readers[number].next_row()
            if turn == 0 < self._readers[number].at.turn:
                self._first_ends[number] = self._num_rows
            drawn[number].append(row)
            self._num_rows += 1
            self._num_characters += 0 if isinstance(row, RowError) else row.num_characters
            if self._num_characters >= WINDOW_CHARACTERS:
                break
        for encoder, rows in zip(self._encoders, drawn, strict=True):
            encoder.add_rows(rows)

    @property
    def _num_documents(self) -> int:
        return sum(made.writer.num_documents for made in self._made)

    @property
    def _num_tokens(self) -> int:
        return sum(made.writer.num_tokens for made in self._made)

    def dataset(self) -> TokenDataset:
        """Return the documents of all rows, source after source.

        Raises:
            DataError: there are none.
        """
        parts = [made.dataset(encoder.report()) for encoder, made in zip(self._encoders, self._made, strict=True)]
        first_error = next((each.counts.first_error for each in self._encoders if each.counts.first_error), None)
        if not any(map(len, parts)):
            raise DataError(
                "data.train",
                f"of {self._num_rows:,} rows in a row no token would be trained",
                "Check data.train_on and data.max_length" if first_error is None else f"The first says: {first_error}",
            )
        whole, _ = _joined([(part, np.arange(len(part))) for part in parts])
        dropped = tuple(each for part in parts for each in part.report.dropped)
        left_out = tuple(each for part in parts for each in part.report.left_out)
        num_rows = sum(part.report.num_rows for part in parts)
        sources = tuple(part.report.sources[0] for part in parts)
        largest = max(part.largest_id for part in parts if len(part))
        report = replace(parts[0].report, num_rows=num_rows, sources=sources, dropped=dropped, left_out=left_out)
        return replace(whole, report=report, known_largest_id=largest)

    def close(self) -> None:
        """Close the open shards."""
        for reader in self._readers:
            reader.close()


class _RowStream:
    """The endless rows of a source from a cursor.

    Args:
        seed: determines their order.
        on_message: called when a server request is retried.
    """

    def __init__(
        self,
        source: DatasetConfig,
        shards: Shards,
        seed: tuple[int, ...],
        at: SourceCursor,
        on_message: OnMessage,
    ) -> None:
        self.at = at
        self._source, self._shards, self._seed, self._on_message = source, shards, seed, on_message
        self._columns = source.their_columns
        self._open: Generator[tuple[str, Any]] | None = None
        self._has_rows = at.row > 0

    def next_row(self) -> DataRow | RowError:
        """Return the next row, or its error.

        Raises:
            DataError: a shard cannot be read, or none has a row.
        """
        while (found := self._next()) is None:
            at = replace(self.at, shard=self.at.shard + 1, row=0)
            if at.shard == len(self._shards):
                if not self._has_rows:
                    raise DataError(self._shards.path, "none of its shards has a row", "Fill them")
                at, self._has_rows = replace(at, shard=0, turn=at.turn + 1), False
            self.at = at
            self.close()
        self._has_rows = True
        self.at = replace(self.at, row=self.at.row + 1)
        where, value = found
        return row_or_error(value, where, self._source.format, self._columns)

    def _next(self) -> tuple[str, Any] | None:
        """Return the next row of this shard, or None at its end; retry after a server error."""
        order = np.random.default_rng((*self._seed, self.at.turn)).permutation(len(self._shards))
        for number in range(NUM_TRIES):
            try:
                if self._open is None:
                    self._open = self._shards.rows(int(order[self.at.shard]), self.at.row)
                return next(self._open, None)
            except ShardError as error:
                self.close()
                if number + 1 == NUM_TRIES:
                    raise
                pause_s = _FIRST_PAUSE_S * 2**number
                self._on_message(f"warning: {error}. It is opened again in {pause_s:g} s")
                time.sleep(pause_s)
        raise AssertionError(NUM_TRIES)

    def close(self) -> None:
        """Close the shard."""
        if self._open is not None:
            self._open.close()
        self._open = None


def _start(make: Callable[[Cursor], _Window], cursor: Cursor) -> Future[_Window]:
    """Prepare a window on a thread.

    The interpreter waits for the thread on exit, which is short: a thread inside the tokenizer must not be killed.
    """
    window: Future[_Window] = Future()

    def run() -> None:
        try:
            window.set_result(make(cursor))
        except BaseException as error:
            window.set_exception(error)

    threading.Thread(target=run, name="data-window").start()
    return window


def _joined(
    parts: Sequence[tuple[TokenDataset, npt.NDArray[np.int64]]],
) -> tuple[TokenDataset, list[list[int]]]:
    """Return some documents of several data sets as one, with the document numbers of each part."""
    rows: list[list[int]] = []
    found: list[tuple[TokenDataset, slice]] = []
    for dataset, documents in parts:
        rows.append(list(range(len(found), len(found) + len(documents))))
        found += [(dataset, slice(*dataset.starts[number : number + 2].tolist())) for number in documents.tolist()]
    starts = np.cumsum([0, *(part.stop - part.start for _, part in found)], dtype=np.int64)
    tokens = np.concatenate([np.empty(0, dtype=np.int32), *(dataset.tokens[part] for dataset, part in found)])
    trained = np.concatenate([np.empty(0, dtype=np.bool_), *(dataset.trained[part] for dataset, part in found)])
    return TokenDataset(tokens, trained, starts, parts[0][0].report), rows
