"""The rows of one source of training data: files found or fetched, then read in a fixed order."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.data.files import EXTRA, find_files, read_file, read_text, suffix_of
from megatrain.data.formats import (
    Document,
    Format,
    Preference,
    Row,
    absent_column,
    format_of,
    preferences,
    row_columns,
    to_row,
    with_columns,
)
from megatrain.data.rows_report import DataError, EmptyFileError, RowError
from megatrain.data.table import DatasetConfig


def rows_of(source: DatasetConfig, files: Sequence[Path]) -> Iterator[Row | RowError]:
    """Yield the rows of a table's files, as :func:`rows_of_files`."""
    return rows_of_files(
        files,
        format=source.format,
        columns={str(ours): theirs for ours, theirs in source.columns.items()},
        max_samples=source.max_samples,
        json_key=source.json_key,
    )


def source_files(path: str, name: str | None = None, split: str | None = None) -> list[Path]:
    """Return the files of a source, in the order in which they are read.

    Raises:
        DataError: nothing there, a file of a kind that is not read, or a hub dataset that cannot be fetched.
    """
    if is_hub_name(path):
        return fetch_dataset(path, name, split)
    if name is not None:
        raise DataError(path, f'subset = "{name}" chooses a part of a hub dataset, this is a path', "Leave it out")
    return find_files(path, split)


def read_rows(
    path: str,
    *,
    format: Format = "auto",
    columns: Mapping[str, str] | None = None,
    max_samples: int | None = None,
    name: str | None = None,
    split: str | None = None,
    json_key: str | None = None,
    on_bad_row: Callable[[RowError], None] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a source in a fixed order, one at a time.

    Args:
        path: file, glob or folder, or the name of a hub dataset.
        format: what a row holds; "auto" looks at its fields, row by row.
        columns: our field name -> theirs.
        max_samples: stop after this many rows.
        name: configuration of a hub dataset.
        split: which split of a folder or hub dataset.
        json_key: as of ``Source``.
        on_bad_row: called for each row that cannot be trained, which is left out but counted as a sample; and for each
            empty file.

    Raises:
        DataError: a missing or damaged file, no row at all, or a row without the fields of its format.
        RowError: a row that cannot be trained, and no ``on_bad_row``.
    """
    files = source_files(path, name, split)
    for row in rows_of_files(files, format=format, columns=columns, max_samples=max_samples, json_key=json_key):
        if not isinstance(row, RowError):
            yield row
        elif on_bad_row is not None:
            on_bad_row(row)
        else:
            raise row


def rows_of_files(
    files: Sequence[Path],
    *,
    format: Format = "auto",
    columns: Mapping[str, str] | None = None,
    max_samples: int | None = None,
    json_key: str | None = None,
) -> Iterator[Row | RowError]:
    """Yield the rows of files, as :func:`read_rows`, and in their place the errors of those that cannot be trained.

    Of empty files there are errors at the end; if all are empty, or no row has a field that ``columns`` names, a
    ``DataError`` ends the rows.
    """
    count = 0
    empty: list[Path] = []
    seen = _SeenFields(dict(columns or {}))
    for file in files:
        is_empty = True
        for row in _rows_of_file(file, format, seen, json_key):
            if max_samples is not None and count >= max_samples:
                return
            is_empty = False
            count += not isinstance(row, Document) or row.is_end
            yield row
        if is_empty:
            empty.append(file)
    if len(empty) == len(files):
        said = "the file is empty" if len(files) == 1 else f"this file and the {len(files) - 1} others are empty"
        raise DataError(str(files[0]), said, "Remove it or fill it")
    yield from (EmptyFileError(str(file)) for file in empty)
    seen.check(files)


class _SeenFields:
    """Whether each field that ``columns`` names is in any row: one that is in none is a mistake in the name.

    Args:
        columns: our field name -> theirs.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        self._missing = row_columns(columns)
        self._fields: dict[str, None] = {}

    def add(self, value: object) -> None:
        """Note the fields of a row."""
        if self._missing and isinstance(value, Mapping):
            self._fields.update(dict.fromkeys(value))
            named = with_columns(value, self._missing)
            self._missing = {ours: theirs for ours, theirs in self._missing.items() if theirs not in named}

    def check(self, files: Sequence[Path]) -> None:
        """Raise ``DataError`` for a name that no row has."""
        if self._fields and (absent := absent_column(self._fields, self._missing)):
            raise DataError(str(files[0]), *absent)


def _rows_of_file(file: Path, format: Format, seen: _SeenFields, json_key: str | None) -> Iterator[Row | RowError]:
    if suffix_of(file) == ".txt":
        if format == "preference":
            advice = "Name a file of rows with prompt, chosen and rejected, e.g. .jsonl"
            raise DataError(str(file), "a .txt file has no preferences", advice)
        if format not in ("auto", "text"):
            raise DataError(str(file), f'a .txt file has no format "{format}"', 'Leave format out, or write "text"')
        is_start = True
        for text, is_end in read_text(file):
            if text.strip() or not (is_start and is_end):
                yield Document(text, str(file), is_start, is_end)
            is_start = False
        return
    for where, value in read_file(file, json_key):
        seen.add(value)
        try:
            yield to_row(value, where, format, seen.columns, file.parent)
        except RowError as error:
            yield error


@dataclass(frozen=True, slots=True)
class Look:
    """What the first row of a source is that can be used.

    Attributes:
        format: What it is read as; "" where no format fits any, whatever the columns.
        columns: Our field name -> theirs, where theirs are others.
        fields: Its own fields; none of plain text.
        problem: Why it cannot be used as it is, "" where it can.
        is_judged: Whether it is one answer with a label, of preferences.
    """

    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    fields: Sequence[str] = ()
    problem: str = ""
    is_judged: bool = False


#: What fields are often called -> (our format, our field -> theirs); the first that are all there are meant.
_OFTEN: tuple[tuple[Format, Mapping[str, str]], ...] = (
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
_ROWS_LOOKED_AT = 100


def look_at(path: str, *, is_preference: bool | None = None) -> Look:
    """Return what the first rows of a file, glob or folder are, and which columns they would be read with.

    Rows that cannot be used are passed over, where another of the first hundred can.

    Args:
        path: A file, a folder, a pattern or a name on the hub.
        is_preference: whether rows are to be preferences; None: if any of them is.

    Raises:
        DataError: nothing there, or a file that cannot be read.
    """
    files = source_files(path)
    for file in files:
        if suffix_of(file) == ".txt":
            if next(_rows_of_file(file, "text", _SeenFields({}), None), None) is not None:
                return Look("text")
            continue
        rows = list(itertools.islice(read_file(file), _ROWS_LOOKED_AT))
        if not rows:
            continue
        if is_preference is None:
            is_preference = any(preferences(_called(value)) is not None for _, value in rows)
        first = None
        for where, value in rows:
            look = _look_at_row(value, where, is_preference=is_preference)
            if not look.problem:
                return look
            first = first or look
        assert first is not None
        return first
    raise DataError(str(files[0]), "the file is empty", "Remove it or fill it")


def _called(value: Any) -> dict[str, Any]:
    """Return the fields of a row in small letters, as names are compared."""
    return {name.strip().casefold(): field for name, field in value.items()} if isinstance(value, Mapping) else {}


def _look_at_row(value: Any, where: str, *, is_preference: bool) -> Look:
    fields = list(value) if isinstance(value, Mapping) else []
    try:
        row = to_row(value, where, "preference" if is_preference else "auto", {})
    except RowError as error:
        return Look("preference" if is_preference else "", {}, fields, str(error))
    except DataError as error:
        if preferences(_called(value)) is None and not is_preference:
            called = {name.strip().casefold(): name for name in fields}
            for format, columns in _OFTEN:
                if all(theirs in called for theirs in columns.values()):
                    names = {ours: called[theirs] for ours, theirs in columns.items() if ours != called[theirs]}
                    try:
                        to_row(
                            {called[theirs]: value[called[theirs]] for theirs in columns.values()}, where, format, names
                        )
                    except (DataError, RowError):
                        continue
                    return Look(format, names, fields)
        return Look("", {}, fields, str(error))
    return Look(format_of(row, value), {}, fields, is_judged=isinstance(row, Preference) and row.rejected is None)


_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def is_hub_name(path: str) -> bool:
    """Return whether a path is the name of a dataset, owner/name, and nothing of that name is here."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def fetch_dataset(path: str, name: str | None = None, split: str | None = None) -> list[Path]:
    """Return the Arrow files of a dataset, fetched if the cache of ``datasets`` does not hold them. Runs no code of it.

    Args:
        path: owner/name.
        split: Default: "train".

    Raises:
        DataError: ``datasets`` is not installed, or it cannot be fetched; with its own words.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            path,
            "there is no such file or folder, and datasets of the hub need the package datasets",
            f"Check the path, which is relative to the config file, or install the data extra: {EXTRA}",
        ) from None
    try:
        found = datasets.load_dataset(path, name, split=split or "train")
    except Exception as error:  # it raises whatever its many readers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = any(os.environ.get(key, "").upper() in ("1", "ON", "YES", "TRUE") for key in _OFFLINE)
        raise DataError(
            path,
            f"this is no file or folder here, and no dataset that could be fetched: {reason.rstrip('.')}",
            "HF_HUB_OFFLINE is set: fetch it once without, or write the path of a file" if offline
            else "Check the spelling, name and split; without a network, write the path of a file",
        ) from None  # fmt: skip
    files = [Path(entry["filename"]) for entry in found.cache_files]
    if not files:
        raise DataError(path, "datasets keeps no files of it", "Save it as parquet and name that file")
    return files


_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
