"""Reads, tokenizes and loads rows in RAM, without a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain.data.chat import RowEncoder, TokenizedRow
from megatrain.data.collate import Collator
from megatrain.data.dataset import InMemoryWriter
from megatrain.data.encoding import Encoder, EncodingOptions, Overlong
from megatrain.data.formats import DataRow, PlainRow, RowReader, read_row
from megatrain.data.loader import BatchLoader
from megatrain.data.packing import BatchShape
from megatrain.data.row_kind import CHATS, RowKind
from megatrain.data.row_order import EpochOrder
from megatrain.data.rows_report import RowError
from megatrain.data.sources import read_source, source_files
from megatrain.data.table import DatasetConfig, RowFormat
from megatrain.data.token_dataset import TokenDataset


def read_rows(
    path: str,
    *,
    name: str | None = None,
    split: str | None = None,
    on_bad_row: Callable[[RowError], None] | None = None,
    kind: RowKind = CHATS,
    **keys: Any,
) -> Iterator[DataRow]:
    """Yield a source's rows. ``keys`` are its config keys. Row errors are raised, or passed to ``on_bad_row``."""
    for row in read_source(DatasetConfig(path=path, **keys), source_files(path, name, split), kind):
        if not isinstance(row, RowError):
            yield row
        elif on_bad_row is not None:
            on_bad_row(row)
        else:
            raise row


def encode_rows(
    rows: Iterable[DataRow],
    encoder: RowEncoder,
    *,
    max_length: int,
    overlong: Overlong = "truncate",
    join_texts: bool = False,
    kind: RowKind = CHATS,
) -> TokenDataset:
    """Tokenize rows of one kind, and return the dataset."""
    made = InMemoryWriter()
    each = Encoder(encoder, made.writer, EncodingOptions(max_length, overlong, kind=kind, join_texts=join_texts))
    each.add_rows(rows)
    each.end_source()
    return made.dataset(each.finish(), kind=kind)


def loader_of(dataset: TokenDataset, shape: BatchShape, *, data_seed: int, **options: Any) -> BatchLoader:
    """Return a loader for a dataset. ``options`` go to the collator."""
    return BatchLoader(EpochOrder(dataset, shape, data_seed), Collator(shape, **options))


def encode_row(encoder: RowEncoder, row: PlainRow) -> TokenizedRow:
    """Return the tokens of a row, or raise the row's RowError."""
    (found,) = encoder.encode_many([row])
    if isinstance(found, RowError):
        raise found
    return found


def to_row(
    value: object, where: str, format: RowFormat | RowReader, columns: Mapping[str, str], folder: Path = Path()
) -> DataRow:
    """Parse a value from a file as a row. ``where`` is its location for error messages."""
    return read_row(value, where, format, columns, folder)[1]
