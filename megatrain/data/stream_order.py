"""Order of streamed rows, and threads that prepare windows of rows in advance."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import astuple, replace
from operator import add
from typing import TYPE_CHECKING

from megatrain.data.packing import BatchShape
from megatrain.data.row_order import LoaderPosition, StepRows
from megatrain.data.rows_report import DataReport, SourceCounts, check_losses
from megatrain.data.stream import StreamDataset
from megatrain.data.stream_window import Cursor, Window, WindowMaker, join_rows

if TYPE_CHECKING:
    from megatrain.data.token_dataset import TokenDataset


class StreamOrder:
    """Order of streamed rows. A resumed run gets the same rows as an uninterrupted run.

    A thread prepares the next window while the run trains on the current window.

    Args:
        max_steps: Number of steps in the run. Used as the length of an epoch, because the real length is unknown.
        num_embeddings: Number of token embeddings in the model.
    """

    def __init__(
        self, streams: StreamDataset, shape: BatchShape, data_seed: int, *, max_steps: int, num_embeddings: int
    ) -> None:
        self.dataset: TokenDataset = streams
        self.steps_per_epoch, self._streams = max_steps, streams
        self._rows_per_step = shape.examples_per_step(1)
        self._maker = WindowMaker(streams, shape, data_seed, num_embeddings)

    def steps(self, start: LoaderPosition) -> Iterator[StepRows]:
        """Yield the rows of each step from ``start`` on. The first step encodes the window at ``start`` again."""
        cursor = Cursor.start(len(self._streams.streams)) if start.cursor is None else Cursor.from_json(start.cursor)
        windows = self._windows(cursor, (self.steps_per_epoch - start.step) * self._rows_per_step)
        window = next(windows)
        for step in itertools.count(start.step + 1):
            parts: list[tuple[TokenDataset, Sequence[int]]] = []
            while len(parts) < self._rows_per_step:
                if cursor.used == len(window.rows):
                    window = next(windows)
                    cursor = window.cursor
                row_range = range(cursor.used, min(cursor.used + self._rows_per_step - len(parts), len(window.rows)))
                parts += [(window.dataset, window.rows[row]) for row in row_range]
                self._report_ends(window, row_range)
                cursor = replace(cursor, used=row_range.stop)
            yield StepRows(*join_rows(parts), LoaderPosition(start.epoch, step, cursor.to_json()))

    def _windows(self, cursor: Cursor, num_rows: int) -> Iterator[Window]:
        """Yield the window at a cursor and all later windows. Prepare the next window in advance if the run needs it.

        Args:
            num_rows: Number of batch rows that the run still needs.
        """
        losses = _LossWarnings(self._streams)
        num_used, future = cursor.used, self._prepare(replace(cursor, used=0))
        while True:
            window = future.result()
            losses.add(window.dataset.report)
            num_rows, num_used = num_rows - len(window.rows) + num_used, 0
            next_future = self._prepare(window.next_cursor(self._rows_per_step)) if num_rows > 0 else None
            yield window
            future = next_future or self._prepare(window.next_cursor(self._rows_per_step))

    def _prepare(self, cursor: Cursor) -> Future[Window]:
        """Prepare a window on a new thread.

        The thread is not a daemon, because Python could kill a daemon thread at exit while it runs the tokenizer.
        Instead, Python waits for the thread at exit.
        """
        window: Future[Window] = Future()

        def run() -> None:
            try:
                window.set_result(self._maker.make(cursor))
            except BaseException as error:
                window.set_exception(error)

        threading.Thread(target=run, name="data-window").start()
        return window

    def _report_ends(self, window: Window, row_range: range) -> None:
        """Report each source that ends for the first time in these batch rows."""
        for source_index, row in window.first_ends.items():
            if row in row_range:
                name = self._streams.data.source_names[source_index]
                self._streams.on_message(
                    f"{name} has been read to its end and starts again, with its shards in another order"
                )


class _LossWarnings:
    """Warnings about sources that lose many rows and about omitted fields. Each warning is issued only once."""

    def __init__(self, streams: StreamDataset) -> None:
        self._streams = streams
        self._counts = [SourceCounts() for _ in streams.streams]
        self._issued: set[str] = set()

    def add(self, report: DataReport) -> None:
        """Add a window's report, and issue its warnings.

        Raises:
            DataError: A source's ``lost_share`` is above ``data.max_dropped``.
        """
        data = self._streams.data
        messages: list[tuple[str, str]] = []
        counts = zip(self._counts, report.sources, strict=True)
        self._counts = [SourceCounts(*map(add, astuple(old), astuple(new))) for old, new in counts]
        example = f" (first: {report.dropped[0].example}: {report.dropped[0].reason})" if report.dropped else ""
        for name, total in zip(data.source_names, self._counts, strict=True):
            losses = check_losses(replace(report, sources=(total,)), [name], data.table.max_dropped)
            messages += [(f"losses of {name}", f"warning: {text}{example}") for text in losses]
        messages += [("fields", f"warning: {text}") for severity, text in report.remarks() if severity == "warning"]
        for key, text in messages:
            if key not in self._issued:
                self._issued.add(key)
                self._streams.on_message(text)
