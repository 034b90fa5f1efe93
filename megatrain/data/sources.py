"""Rows of a training data source: find or fetch the source's files, and read them in a fixed order."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.data.files import find_files, read_file, read_text, suffix_of
from megatrain.data.formats import (
    DataRow,
    Document,
    RowReader,
    explain_preferences,
    find_absent_column,
    read_row,
    row_columns,
    with_columns,
)
from megatrain.data.preference_format import PREFERENCE, Preference
from megatrain.data.row_kind import RowKind
from megatrain.data.rows_report import DataError, EmptyFileError, RowError
from megatrain.data.table import DatasetConfig, RowFormat
from tiered.errors import install_command


def source_files(path: str, name: str | None = None, split: str | None = None) -> list[Path]:
    """Return a source's files in reading order.

    Raises:
        DataError: No file matches, a file's format is not supported, or a hub dataset cannot be fetched.
    """
    if is_hub_name(path):
        return fetch_dataset(path, name, split)
    if name is not None:
        raise DataError(path, f'subset = "{name}" selects a part of a hub dataset, but this is a path', "Remove subset")
    return find_files(path, split)


def read_source(source: DatasetConfig, files: Sequence[Path], kind: RowKind) -> Iterator[DataRow | RowError]:
    """Yield a source's rows in order. Yield a RowError for each row that cannot be used for training.

    Errors for empty files are yielded last.

    Raises:
        DataError: A file is missing or damaged, a row lacks required fields, all files are empty, or a column in
            ``columns`` occurs in no row.
    """
    count = 0
    empty_files: list[Path] = []
    column_check = _ColumnCheck(source.column_names)
    for file in files:
        is_empty = True
        for row in _read_file_rows(file, kind.reader or source.format, column_check, source.json_key):
            if source.max_samples is not None and count >= source.max_samples:
                return
            is_empty = False
            count += not isinstance(row, Document) or row.is_end
            yield row
        if is_empty:
            empty_files.append(file)
    if len(empty_files) == len(files):
        problem = "the file is empty" if len(files) == 1 else f"this file and {len(files) - 1} other files are empty"
        raise DataError(str(files[0]), problem, "Remove it or fill it")
    yield from (EmptyFileError(str(file)) for file in empty_files)
    column_check.check(files)


class _ColumnCheck:
    """Checker for columns in ``columns`` that occur in no row, often because they are misspelled.

    Args:
        columns: Column name of each field.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        self._missing_columns = row_columns(columns)
        self._fields: dict[str, None] = {}

    def add(self, value: object) -> None:
        """Record a row's columns."""
        if self._missing_columns and isinstance(value, Mapping):
            self._fields.update(dict.fromkeys(value))
            row = with_columns(value, self._missing_columns)
            self._missing_columns = {k: column for k, column in self._missing_columns.items() if column not in row}

    def check(self, files: Sequence[Path]) -> None:
        """Raise DataError if one of the columns occurs in no row."""
        if self._fields and (error_parts := find_absent_column(self._fields, self._missing_columns)):
            raise DataError(str(files[0]), *error_parts)


def _read_file_rows(
    file: Path, row_format: RowFormat | RowReader, column_check: _ColumnCheck, json_key: str | None
) -> Iterator[DataRow | RowError]:
    if suffix_of(file) == ".txt":
        if isinstance(row_format, RowReader):
            raise DataError(str(file), f"a .txt file has no {row_format.name}s", "Use a file of rows, e.g. .jsonl")
        if row_format not in ("auto", "text"):
            raise DataError(str(file), f'a .txt file cannot have format "{row_format}"', 'Remove format, or set "text"')
        is_start = True
        for text, is_end in read_text(file):
            if text.strip() or not (is_start and is_end):
                yield Document(text, str(file), is_start, is_end)
            is_start = False
        return
    for location, value in read_file(file, json_key):
        column_check.add(value)
        yield parse_row(value, location, row_format, column_check.columns, file.parent)


def parse_row(
    value: object, location: str, row_format: RowFormat | RowReader, columns: Mapping[str, str], folder: Path = Path()
) -> DataRow | RowError:
    """Parse a row with :func:`read_row`. Return the row, or the error that makes it unusable."""
    try:
        return read_row(value, location, row_format, columns, folder)[1]
    except RowError as error:
        return error


@dataclass(frozen=True, slots=True)
class SourcePreview:
    """Format and columns of a source's first usable row.

    Attributes:
        format: Format of the row, or "" if no format fits.
        columns: Column name of each field, for fields whose column has a different name.
        fields: Column names of the row. Empty for plain text.
        problem: Reason why the row cannot be used, or "".
        has_label: Whether the row is a preference that consists of one answer with a label.
    """

    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    fields: Sequence[str] = ()
    problem: str = ""
    has_label: bool = False


#: Common column names: (format, column name of each field). The first entry that fits a row is used.
_COMMON_COLUMNS: tuple[tuple[RowFormat, Mapping[str, str]], ...] = (
    ("messages", {"messages": "conversation"}),
    ("messages", {"messages": "dialog"}),
    ("messages", {"messages": "chat"}),
    ("alpaca", {"instruction": "question", "output": "answer"}),
    ("alpaca", {"instruction": "query", "output": "response"}),
    ("alpaca", {"instruction": "instruction", "output": "response"}),
    ("alpaca", {"instruction": "prompt", "output": "response"}),
    ("alpaca", {"instruction": "prompt", "output": "answer"}),
    ("alpaca", {"instruction": "question", "output": "response"}),
    ("alpaca", {"instruction": "input", "output": "output"}),
    ("alpaca", {"instruction": "inputs", "output": "targets"}),
    ("alpaca", {"instruction": "problem", "output": "solution"}),
    ("text", {"text": "content"}),
    ("text", {"text": "body"}),
    ("text", {"text": "document"}),
)
_NUM_PREVIEW_ROWS = 100


def detect_format(path: str, kind: RowKind | None = None) -> SourcePreview:
    """Detect a source's format, and the ``columns`` needed to read it, from its first usable row.

    If none of the first hundred rows can be used, describe the first row.

    Args:
        path: A file, folder, glob pattern or hub name.
        kind: Kind that the rows must have, or None to detect from the rows whether they are preferences.

    Raises:
        DataError: No file matches, all files are empty, or a file cannot be read.
    """
    files = source_files(path)
    for file in files:
        if suffix_of(file) == ".txt":
            if next(_read_file_rows(file, "text", _ColumnCheck({}), None), None) is not None:
                return SourcePreview("text")
            continue
        rows = list(itertools.islice(read_file(file), _NUM_PREVIEW_ROWS))
        if not rows:
            continue
        has_answers = any(explain_preferences(_lowercase_fields(value)) is not None for _, value in rows)
        is_preference = has_answers if kind is None else kind.reader is PREFERENCE
        first_preview = None
        for location, value in rows:
            preview = _detect_row_format(value, location, is_preference=is_preference)
            if not preview.problem:
                return preview
            first_preview = first_preview or preview
        assert first_preview is not None
        return first_preview
    raise DataError(str(files[0]), "the file is empty", "Remove it or fill it")


def _lowercase_fields(value: Any) -> dict[str, Any]:
    """Return a row's fields with lower-case names, so that names can be compared case-insensitively."""
    return {name.strip().casefold(): field for name, field in value.items()} if isinstance(value, Mapping) else {}


def _detect_row_format(value: Any, location: str, *, is_preference: bool) -> SourcePreview:
    fields = list(value) if isinstance(value, Mapping) else []
    try:
        name, row = read_row(value, location, PREFERENCE if is_preference else "auto", {})
    except RowError as error:
        return SourcePreview("preference" if is_preference else "", {}, fields, str(error))
    except DataError as error:
        if explain_preferences(_lowercase_fields(value)) is None and not is_preference:
            lookup = {name.strip().casefold(): name for name in fields}
            for row_format, columns in _COMMON_COLUMNS:
                if all(column in lookup for column in columns.values()):
                    names = {name: lookup[column] for name, column in columns.items() if name != lookup[column]}
                    try:
                        sample = {lookup[column]: value[lookup[column]] for column in columns.values()}
                        read_row(sample, location, row_format, names)
                    except (DataError, RowError):
                        continue
                    return SourcePreview(row_format, names, fields)
        return SourcePreview("", {}, fields, str(error))
    return SourcePreview(name, {}, fields, has_label=isinstance(row, Preference) and row.rejected is None)


_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def is_hub_name(path: str) -> bool:
    """Return whether a path looks like a hub name (owner/name) and does not exist locally."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def fetch_dataset(path: str, name: str | None = None, split: str | None = None) -> list[Path]:
    """Return the Arrow files of a hub dataset. Download the dataset if it is not in the cache of ``datasets``.

    Code in the dataset is never run.

    Args:
        path: Hub name, in the form owner/name.
        split: Name of the split. None for "train".

    Raises:
        DataError: ``datasets`` is not installed, or the dataset cannot be fetched.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            path,
            "there is no such file or folder, and hub datasets need the package datasets",
            f"Check the path, which is relative to the config file, or install datasets: {install_command('data')}",
        ) from None
    try:
        dataset = datasets.load_dataset(path, name, split=split or "train")
    except Exception as error:  # the readers of datasets raise many types of errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        is_offline = any(os.environ.get(key, "").upper() in ("1", "ON", "YES", "TRUE") for key in _OFFLINE_VARIABLES)
        raise DataError(
            path,
            f"there is no such file or folder, and no hub dataset could be fetched: {reason.rstrip('.')}",
            "HF_HUB_OFFLINE is set: unset it to fetch the dataset once, or use the path of a file" if is_offline
            else "Check the spelling, subset and split; without a network, use the path of a file",
        ) from None  # fmt: skip
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not files:
        raise DataError(
            path, "the dataset has no files in the cache", "Save it as parquet and use the path of that file"
        )
    return files


_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
