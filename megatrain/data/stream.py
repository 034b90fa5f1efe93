"""Streams of training rows. Streams are read during the run, without a first pass and without a cache.

A run draws rows one at a time by source weight, and collects them in windows (`stream_window.py`). Each window is
encoded, assigned to batch rows and shuffled like a whole dataset. The batches depend only on the shards, the seed and
the cursor. The cursor has each source's position at the start of the window, and the number of rows used since.
Checkpoints store only the cursor. Every rank draws the same rows, whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.cache import TokenCache, cache_folder
from megatrain.data.dataset import DataSpec, OnMessage, load_dataset, source_checksums
from megatrain.data.rows_report import DataError, DataReport, SourceCounts
from megatrain.data.shards import Shards
from megatrain.data.sources import is_hub_name, source_files
from megatrain.data.token_dataset import TokenDataset
from tiered import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.table import DataConfig


@dataclass(frozen=True, slots=True)
class StreamReport(DataReport):
    """Report that describes the streams in words, because their rows are only counted during the run."""

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
        parts = (sources, data.table.train_on, data.encoding, data.seed, tokenizer, template)
        return f"stream-{checksum(repr(parts).encode())}"


def open_dataset(
    data: DataSpec, tokenizer: PreTrainedTokenizerFast, on_message: OnMessage = lambda text: None
) -> TokenDataset:
    """Call ``open_stream`` if the data is streamed, else ``load_dataset``. Raises the errors of that function."""
    open_function = open_stream if data.table.streaming else load_dataset
    return open_function(data, tokenizer, on_message)


def open_stream(data: DataSpec, tokenizer: PreTrainedTokenizerFast, on_message: OnMessage) -> StreamDataset:
    """Open a run's sources as streams. This lists the shards but does not read them.

    Raises:
        DataError: A source's shards cannot be listed, or a source has no shards.
    """
    streams = tuple(Shards(source.path) for source in data.table.train)
    description = ", ".join(f"{len(shards):,} shard{'s' * (len(shards) != 1)} of {shards.path}" for shards in streams)
    counts = tuple(SourceCounts() for _ in streams)
    report = StreamReport(0, 0, 0, 0, 0, 0, 0, sources=counts, text=f"streamed during the run: {description}")
    return StreamDataset(
        np.empty(0, dtype=np.int32),
        np.empty(0, dtype=np.bool_),
        np.zeros(1, dtype=np.int64),
        report,
        known_largest_id=0,
        kind=data.kind,
        source_checksums=lambda: tuple(map(_shards_checksum, streams)),
        data=data,
        tokenizer=copy.deepcopy(tokenizer),  # for the thread that prepares windows; tokenizers are not thread-safe
        streams=streams,
        on_message=on_message,
    )


def _shards_checksum(shards: Shards) -> str:
    return checksum(repr(shards.describe()).encode())


def changed_sources(table: DataConfig, recorded_checksums: Sequence[str]) -> list[str]:
    """Return a message for each source whose files have changed. Nothing is tokenized.

    If a source cannot be read, the message states the reason. Hub datasets are skipped, because reading one could
    start a download.

    Args:
        table: ``[data]``, with ``streaming`` as it was when the run started.
        recorded_checksums: Result of ``TokenDataset.source_checksums`` at that time. Empty if it was not recorded.
    """
    if recorded_checksums and len(recorded_checksums) != len(table.train):
        return [f"data.train: number of sources: {len(recorded_checksums)} -> {len(table.train)}"]
    folder = None
    with contextlib.suppress(DataError):  # without a cache, the files are read to compute their checksums
        folder = None if table.streaming else cache_folder(table.cache_dir, lambda text: None)
    cache = None if folder is None else TokenCache(folder)
    lines = []
    for index, (source, old_checksum) in enumerate(zip(table.train, recorded_checksums, strict=False)):
        if not table.streaming and is_hub_name(source.path):
            continue
        try:
            if table.streaming:
                new_checksum = _shards_checksum(Shards(source.path))
            else:
                (new_checksum,) = source_checksums([source_files(source.path, source.subset, source.split)], cache)
        except (DataError, OSError) as error:
            lines.append(f"data.train.{index}: cannot be compared: {error}")
            continue
        if new_checksum != old_checksum:
            subject = "names or sizes of the shards" if table.streaming else "contents of the files"
            lines.append(f"data.train.{index}: the {subject} have changed ({source.path})")
    return lines
