"""Streams of training rows. Streams are read during the run, without a first pass and without a cache.

The loader draws rows one at a time by source weight, and collects them in windows (`WINDOW_ROWS`, `WINDOW_CHARACTERS`).
Each window is encoded, packed and shuffled like a whole dataset (`dataset.py`, `packing.py`). The batches depend only
on the shards, the seed and the cursor. The cursor has each source's position at the start of the window, and the number
of rows used since. Checkpoints store only the cursor. Every rank draws the same rows, whatever the number of ranks.
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
    InMemoryWriter,
    OnMessage,
    TokenDataset,
    check_id_range,
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

#: Indices of random streams. The loader and the dataset use streams 0 to 3.
_SHARDS, _ROWS, _ORDER = 4, 5, 6
#: Maximum rows and characters in a window. The rows of a window are tokenized together and kept in RAM.
WINDOW_ROWS = 4096
WINDOW_CHARACTERS = 1 << 24
#: Number of attempts to open a shard. After the last attempt, a server error ends the run.
NUM_TRIES = 5
_FIRST_PAUSE_S = 0.5
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class SourceCursor:
    """Position in a source.

    Attributes:
        turn: How often the source has been read to its end.
        shard: Index of the current shard in this turn's shuffled order.
        row: Number of rows drawn from the current shard.
        credit: The source's credit, in rows. See ``_draw``.
    """

    turn: int = 0
    shard: int = 0
    row: int = 0
    credit: float = 0.0


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
    def from_json(cls, values: Mapping[str, Any]) -> Cursor:
        """Create a cursor from the output of ``asdict``. Checkpoints store this output."""
        return cls(**{**values, "sources": tuple(SourceCursor(**each) for each in values["sources"])})


@dataclass(frozen=True)
class _Window:
    """Rows that were drawn and encoded together.

    Attributes:
        cursor: Position in the streams before the window.
        after: Position in each source after the window.
        rows: Documents of each batch row, in the order in which the rows are used.
        first_ends: First batch row that repeats a source, for each source whose first turn ends in this window.
    """

    cursor: Cursor
    after: tuple[SourceCursor, ...]
    dataset: TokenDataset
    rows: list[npt.NDArray[np.int64]]
    first_ends: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class StreamReport(DataReport):
    """Describes streams instead of giving counts, because the rows of streams are counted only during the run."""

    text: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class StreamDataset(TokenDataset):
    """Sources that are read during the run. The dataset itself is empty, because no document has been read yet."""

    data: DataSpec
    tokenizer: PreTrainedTokenizerFast
    streams: tuple[Shards, ...]
    on_message: OnMessage

    def fingerprint(self) -> str:
        """Return a checksum of the options and the shards' names and sizes. The shards are not read."""
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
    """Call ``open_stream`` if the data is streamed, else ``load_dataset``. Raises the errors of that function."""
    opened = open_stream if data.table.streaming else load_dataset
    return opened(data, tokenizer, on_message)


def open_stream(data: DataSpec, tokenizer: PreTrainedTokenizerFast, on_message: OnMessage) -> StreamDataset:
    """Open a run's sources as streams. This lists the shards but does not read them.

    Raises:
        DataError: A source's shards cannot be listed, or a source has no shards.
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
        tokenizer=copy.deepcopy(tokenizer),  # the thread that prepares windows needs its own copy
        streams=streams,
        on_message=on_message,
    )


def _checksum_of_shards(shards: Shards) -> str:
    return checksum(repr(shards.describe()).encode())


def changed_sources(table: DataConfig, before: Sequence[str]) -> list[str]:
    """Return a message for each source whose files have changed. Nothing is tokenized.

    If a source cannot be read, the message states the reason. Hub datasets are skipped, because reading them could
    download them.

    Args:
        table: ``[data]``, with ``streaming`` as it was when the run started.
        before: Result of ``TokenDataset.source_checksums`` at that time. Empty if it was not recorded.
    """
    if before and len(before) != len(table.train):
        return [f"data.train: number of sources: {len(before)} -> {len(table.train)}"]
    folder = None
    with contextlib.suppress(DataError):  # without a cache, the files are read to compute their checksums
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
            what = "names or sizes of the shards" if table.streaming else "contents of the files"
            lines.append(f"data.train.{number}: the {what} have changed ({source.path})")
    return lines


def refuse_streams(data: DataSpec, what: str) -> None:
    """Raise DataError if the data is streamed. Call this before an operation that needs all rows.

    Args:
        what: Name of the operation in the message, in the plural.
    """
    if data.table.streaming:
        raise DataError(
            "data.streaming",
            f"{what} need a pass over all data, but streams are read only as far as a run uses them",
            "Remove data.streaming and use local files",
        )


def rows_in_order(source: DatasetConfig, kind: RowKind) -> Iterator[DataRow | RowError]:
    """Yield a source's rows in the order of its sorted shards. Each row is read only when it is needed."""
    shards = Shards(source.path)
    for index in range(len(shards)):
        for where, value in shards.rows(index, 0):
            yield row_or_error(value, where, kind.reader or source.format, source.their_columns)


class StreamLoader(BatchLoader):
    """Loader of streamed rows. All ranks get the same batches, and a resumed run gets the same batches again.

    A thread prepares the next window while the run trains on the current window. When a source ends, the loader starts
    the source again, with its shards in a different order.

    Args:
        max_steps: Number of steps in the run. Used as the length of an epoch, because the real length is unknown.
        num_embeddings: Number of token embeddings in the model.
        arguments: Arguments for ``BatchLoader``.
    """

    def __init__(self, dataset: StreamDataset, *, max_steps: int, num_embeddings: int, **arguments: Any) -> None:
        self._streams, self._max_steps, self._num_embeddings = dataset, max_steps, num_embeddings
        self._reported: set[str] = set()
        super().__init__(dataset, **arguments)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in the run."""
        return self._max_steps

    def fingerprint(self) -> str:
        """Return a checksum of the sources and options."""
        return self._streams.fingerprint()

    def seek(self, position: LoaderPosition) -> None:
        """Continue from ``position``. The next step reads the shards up to this point and encodes one window again."""
        self._position = position
        start = Cursor(0, 0, 0, 0, tuple(SourceCursor() for _ in self._streams.streams))
        if position.cursor is not None:
            start = Cursor.from_json(position.cursor)
        self._cursor = start
        self._window: _Window | None = None
        self._pending: Future[_Window] | None = None
        self._counts = [SourceCounts() for _ in self._streams.streams]

    def __next__(self) -> StepBatch:
        rows_per_step = self._micro_batch_size * self._num_micro_batches
        parts: list[tuple[TokenDataset, npt.NDArray[np.int64]]] = []
        while len(parts) < rows_per_step:
            window = self._current_window()
            left = window.rows[self._cursor.used :][: rows_per_step - len(parts)]
            parts += [(window.dataset, row) for row in left]
            self._report_ends(window, range(self._cursor.used, self._cursor.used + len(left)))
            self._cursor = replace(self._cursor, used=self._cursor.used + len(left))
            if self._cursor.used == len(window.rows) and len(parts) < rows_per_step:
                self._begin_next(window)
        self._dataset, rows = _join(parts)
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
        """The dataset of sources. It contains no documents."""
        return self._streams

    # -- windows -----------------------------------------------------------------------------------------------------

    def _current_window(self) -> _Window:
        """Return the window at the cursor. If the run needs the next window, start preparing it."""
        if self._window is None:
            making = self._pending or _prepare_on_thread(self._make_window, replace(self._cursor, used=0))
            self._window, self._pending = making.result(), None
            self._warn_of_losses(self._window)
            rows_left = len(self._window.rows) - self._cursor.used
            rows_needed = (self._max_steps - self._position.step) * self._micro_batch_size * self._num_micro_batches
            if rows_needed > rows_left:
                self._pending = _prepare_on_thread(self._make_window, self._next_cursor(self._window))
        return self._window

    def _begin_next(self, window: _Window) -> None:
        self._cursor, self._window = self._next_cursor(window), None

    def _next_cursor(self, window: _Window) -> Cursor:
        """Return the cursor of the window that follows ``window``."""
        rows_per_step = self._micro_batch_size * self._num_micro_batches
        step, place = divmod(window.cursor.place + len(window.rows), rows_per_step)
        return Cursor(window.cursor.window + 1, window.cursor.step + step, place, 0, window.after)

    def _make_window(self, cursor: Cursor) -> _Window:
        """Draw, encode, pack and shuffle the rows of a window."""
        draft = _WindowDraft(self._streams, cursor, self._data_seed)
        rows_left = None
        if draft.until is not None:
            rows_left = (draft.until - cursor.step) * self._micro_batch_size * self._num_micro_batches - cursor.place
        try:
            draft.fill(rows_left, self._max_length if self._packing else None)
        finally:
            draft.close()
        dataset = draft.dataset()
        check_id_range(dataset, self._num_embeddings, where=str(self._streams.tokenizer.name_or_path))
        documents = np.random.default_rng((self._data_seed, _ROWS, cursor.window)).permutation(len(dataset))
        members, starts = documents, np.arange(len(documents) + 1)
        if self._packing:
            members, starts = pack_documents(documents, dataset.lengths()[documents], self._max_length)
        order = np.random.default_rng((self._data_seed, _ORDER, cursor.window)).permutation(len(starts) - 1)
        rows = [members[starts[row] : starts[row + 1]] for row in order]
        first_ends = {number: int(share * len(rows)) for number, share in draft.first_ends.items()}
        return _Window(cursor, draft.after, dataset, rows, first_ends)

    def _report_ends(self, window: _Window, used: range) -> None:
        """Report each source that ends for the first time in these batch rows."""
        for number, at in window.first_ends.items():
            if at in used:
                name = self._streams.data.source_names[number]
                self._streams.on_message(
                    f"{name} has been read to its end and starts again, with its shards in another order"
                )

    def _warn_of_losses(self, window: _Window) -> None:
        """Warn if much of a source is dropped or if the chat template omits fields. Give each warning only once.

        Raises:
            DataError: A source loses more than ``data.max_dropped`` to dropping or truncation.
        """
        data, report = self._streams.data, window.dataset.report
        messages: list[tuple[str, str]] = []
        counts = zip(self._counts, report.sources, strict=True)
        self._counts = [SourceCounts(*map(add, astuple(before), astuple(now))) for before, now in counts]
        why = f" (first: {report.dropped[0].example}: {report.dropped[0].reason})" if report.dropped else ""
        for name, total in zip(data.source_names, self._counts, strict=True):
            losses = check_losses(replace(report, sources=(total,)), [name], data.table.max_dropped)
            messages += [(f"losses of {name}", f"warning: {text}{why}") for text in losses]
        messages += [("fields", f"warning: {text}") for severity, text in report.remarks() if severity == "warning"]
        for what, text in messages:
            if what not in self._reported:
                self._reported.add(what)
                self._streams.on_message(text)


class _WindowDraft:
    """Draws and encodes the rows of a new window.

    Args:
        cursor: Position in the streams before the window.
        data_seed: Random seed for the order of the shards.

    Attributes:
        until: Step at which the source weights change next, or None if they no longer change.
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
        self._writers = [InMemoryWriter() for _ in self._readers]
        self._encoders = [Encoder(rows, made.writer, data.encoding) for made in self._writers]
        self._num_rows = self._num_characters = 0
        self._first_ends: dict[int, int] = {}

    @property
    def first_ends(self) -> dict[int, float]:
        """For each source whose first turn ends in this window, the fraction of the window's rows drawn before that."""
        return {number: count / self._num_rows for number, count in self._first_ends.items()}

    @property
    def after(self) -> tuple[SourceCursor, ...]:
        """Current position in each source."""
        return tuple(
            replace(reader.at, credit=credit) for reader, credit in zip(self._readers, self._credits, strict=True)
        )

    def fill(self, rows_left: int | None, row_tokens: int | None) -> None:
        """Draw rows until the window is full, or until it has enough rows for all steps before the weights change.

        Args:
            rows_left: Number of batch rows before the weights change, or None if they do not change.
            row_tokens: Number of tokens in a packed row, or None if each row contains one document.
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
        """Draw and encode rows.

        Before each draw, the sources share one credit by weight. The source with the most credit provides the row and
        pays one credit. Each source's number of rows therefore stays within one row of its share.
        """
        drawn: list[list[DataRow | RowError]] = [[] for _ in self._readers]
        for _ in range(count):
            for number, share in enumerate(self._shares):
                self._credits[number] += share
            number = max(range(len(drawn)), key=lambda each: (self._shares[each] > 0, self._credits[each], -each))
            self._credits[number] -= 1.0
            if not threading.main_thread().is_alive():
                raise DataError("data.train", "the program is exiting and needs no more rows")
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
        return sum(made.writer.num_documents for made in self._writers)

    @property
    def _num_tokens(self) -> int:
        return sum(made.writer.num_tokens for made in self._writers)

    def dataset(self) -> TokenDataset:
        """Return the documents of all rows, sorted by source. Raises DataError if there is no token to train on."""
        parts = [made.dataset(encoder.report()) for encoder, made in zip(self._encoders, self._writers, strict=True)]
        first_error = next((each.counts.first_error for each in self._encoders if each.counts.first_error), None)
        if not any(map(len, parts)):
            raise DataError(
                "data.train",
                f"no token of {self._num_rows:,} consecutive rows would be trained",
                "Check data.train_on and data.max_length" if first_error is None else f"The first error: {first_error}",
            )
        whole, _ = _join([(part, np.arange(len(part))) for part in parts])
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
    """Infinite iterator over the rows of a source.

    Args:
        seed: Random seed for the order of the shards.
        at: Position at which to start.
        on_message: Called when a shard is opened again after an error.
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
        """Return the next row, or the error that makes the row unusable.

        Raises:
            DataError: A shard cannot be read, or the source has no rows.
        """
        while (found := self._next_in_shard()) is None:
            at = replace(self.at, shard=self.at.shard + 1, row=0)
            if at.shard == len(self._shards):
                if not self._has_rows:
                    raise DataError(self._shards.path, "none of its shards has a row", "Add rows")
                at, self._has_rows = replace(at, shard=0, turn=at.turn + 1), False
            self.at = at
            self.close()
        self._has_rows = True
        self.at = replace(self.at, row=self.at.row + 1)
        where, value = found
        return row_or_error(value, where, self._source.format, self._columns)

    def _next_in_shard(self) -> tuple[str, Any] | None:
        """Return the current shard's next row, or None at the end of the shard. Retry after an error."""
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
                self._on_message(f"warning: {error}. Retrying in {pause_s:g} s")
                time.sleep(pause_s)
        raise AssertionError(NUM_TRIES)

    def close(self) -> None:
        """Close the current shard."""
        if self._open is not None:
            self._open.close()
        self._open = None


def _prepare_on_thread(make: Callable[[Cursor], _Window], cursor: Cursor) -> Future[_Window]:
    """Prepare a window on a new thread.

    The thread is not a daemon, because a daemon could be killed in the tokenizer. It ends soon after the main thread.
    """
    window: Future[_Window] = Future()

    def run() -> None:
        try:
            window.set_result(make(cursor))
        except BaseException as error:
            window.set_exception(error)

    threading.Thread(target=run, name="data-window").start()
    return window


def _join(
    parts: Sequence[tuple[TokenDataset, npt.NDArray[np.int64]]],
) -> tuple[TokenDataset, list[list[int]]]:
    """Join documents from several datasets. Return the joined dataset, and the new document indices of each part."""
    rows: list[list[int]] = []
    found: list[tuple[TokenDataset, slice]] = []
    for dataset, documents in parts:
        rows.append(list(range(len(found), len(found) + len(documents))))
        found += [(dataset, slice(*dataset.starts[number : number + 2].tolist())) for number in documents.tolist()]
    starts = np.cumsum([0, *(part.stop - part.start for _, part in found)], dtype=np.int64)
    tokens = np.concatenate([np.empty(0, dtype=np.int32), *(dataset.tokens[part] for dataset, part in found)])
    trained = np.concatenate([np.empty(0, dtype=np.bool_), *(dataset.trained[part] for dataset, part in found)])
    return TokenDataset(tokens, trained, starts, parts[0][0].report), rows
