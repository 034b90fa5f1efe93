"""Shards of a streamed source: files in a folder or at a URL, whose rows are read shard by shard in random order.

Reading can start at any row of a shard without loading the rows before it.
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from megatrain.data.files import import_pyarrow, json_lines, parquet_values, reject_mds
from megatrain.data.formats import DataRow
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.sources import parse_row
from megatrain.data.table import DatasetConfig
from tiered.units import MiB

#: File name suffixes of shards, and additional suffixes of compressed shards.
_LINES_SUFFIXES, _PARQUET_SUFFIXES = (".jsonl", ".ndjson"), (".parquet",)
_COMPRESSION_SUFFIXES = (".gz", ".zst", ".zstd")
_FORMATS = ".jsonl (also compressed: .jsonl.gz, .jsonl.zst or .jsonl.zstd) and .parquet"
_BLOCK_BYTES = 8 * MiB
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_GLOB_PATTERN = re.compile(r"[*?\[]")
#: Number of attempts to open a shard. After the last attempt, a server error ends the run.
NUM_ATTEMPTS = 5
_FIRST_RETRY_S = 0.5


class ShardError(DataError):
    """Failure to read a shard completely. A later attempt can succeed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that contains rows.

    Attributes:
        name: Path relative to the folder that contains all shards of the source.
    """

    path: str
    name: str
    nbytes: int


class Shards:
    """All shards of a source, sorted by name.

    Args:
        path: Path or fsspec URL of a folder or file, or a glob pattern. Subfolders are also searched.

    Raises:
        DataError: The path cannot be opened, or there is no shard at this path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        protocol = path.partition("://")[0] if "://" in path else ""
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(path, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(protocol)
            advice = f"pip install {package}" if package else "Use the path of a folder, or a URL that fsspec supports"
            raise DataError(path, f"it cannot be opened: {error}", advice) from None
        try:
            self.shards = self._list_shards()
        except DataError:
            raise
        except Exception as error:  # fsspec's file systems raise many types of errors
            raise self._read_error(path, error) from error

    def __len__(self) -> int:
        return len(self.shards)

    def describe(self) -> list[tuple[str, int]]:
        """Return the name and size of each shard, for fingerprints. No shard is read."""
        return [(shard.name, shard.nbytes) for shard in self.shards]

    def rows(self, index: int, start: int) -> Generator[tuple[str, Any]]:
        """Yield (location, value) for each row of a shard, starting at row ``start``.

        Raises:
            ShardError: The shard cannot be read.
            DataError: The shard is damaged.
        """
        shard = self.shards[index]
        read_rows = self._read_parquet if _has_suffix(shard.path, _PARQUET_SUFFIXES) else self._read_lines
        try:
            with closing(read_rows(shard, start)) as rows:
                yield from rows
        except DataError:
            raise
        except Exception as error:
            raise self._read_error(shard.path, error) from error

    # -- search for shards -----------------------------------------------------------------------------------------

    def _list_shards(self) -> list[Shard]:
        files, root = self._files, self._root
        entries = files.glob(root, detail=True) if _GLOB_PATTERN.search(root) else files.find(root, detail=True)
        sizes = {name: int(info.get("size") or 0) for name, info in entries.items() if info.get("type") != "directory"}
        if not sizes:
            raise DataError(self.path, "there is no such file or folder, or the folder is empty", "Check the path")
        reject_mds(sorted(sizes))
        names = [
            name
            for name in sorted(sizes)
            if _has_suffix(_strip_compression(name), _LINES_SUFFIXES) or _has_suffix(name, _PARQUET_SUFFIXES)
        ]
        if not names:
            raise DataError(
                self.path, f"no file there can be streamed, for example '{min(sizes)}'", f"Supported shards: {_FORMATS}"
            )
        prefix_length = len(names[0].rpartition("/")[0]) if len(names) == 1 else len(_common_folder(names))
        return [Shard(name, name[prefix_length:].lstrip("/"), sizes[name]) for name in names]

    # -- rows of a shard ---------------------------------------------------------------------------------------------

    def _read_lines(self, shard: Shard, start: int) -> Generator[tuple[str, Any]]:
        with (
            self._files.open(shard.path, "rb", block_size=_BLOCK_BYTES) as file,
            _open_decompressed(shard.path, file) as text,
        ):
            yield from json_lines(text, shard.path, start)

    def _read_parquet(self, shard: Shard, start: int) -> Generator[tuple[str, Any]]:
        import_pyarrow(shard.path, "such files")
        with self._files.open(shard.path, "rb", block_size=_BLOCK_BYTES) as file:
            for row_number, value in enumerate(parquet_values(file, shard.path, start), start=start + 1):
                yield f"{shard.path} row {row_number}", value

    def _read_error(self, path: str, error: Exception) -> ShardError:
        text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        names = [error_type.__name__ for error_type in type(error).__mro__]
        advice = "Check the path and its permissions"
        if "NoCredentialsError" in names or "locate credentials" in text:
            advice = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return ShardError(path, f"it cannot be read: {text}", advice)


@dataclass(frozen=True, slots=True)
class SourceCursor:
    """Position in a source.

    Attributes:
        turn: Number of times that the source has been read to its end.
        shard: Index of the current shard in this turn's shuffled order.
        row: Number of rows drawn from the current shard.
        credit: The source's credit, in rows. ``stream_window._fill`` explains it.
    """

    turn: int = 0
    shard: int = 0
    row: int = 0
    credit: float = 0.0


class RowStream:
    """Infinite iterator over the rows of a source.

    Args:
        seed: Random seed for the order of the shards.
        cursor: Position at which to start.
        on_message: Called when a shard is opened again after an error.
    """

    def __init__(
        self,
        source: DatasetConfig,
        shards: Shards,
        seed: tuple[int, ...],
        cursor: SourceCursor,
        on_message: Callable[[str], None],
    ) -> None:
        self.cursor = cursor
        self._source, self._shards, self._seed, self._on_message = source, shards, seed, on_message
        self._columns = source.column_names
        self._rows: Generator[tuple[str, Any]] | None = None
        self._has_rows = cursor.row > 0

    def next_row(self) -> DataRow | RowError:
        """Return the next row, or the error that makes the row unusable.

        Raises:
            DataError: A shard cannot be read, or the source has no rows.
        """
        while (item := self._next_in_shard()) is None:
            cursor = replace(self.cursor, shard=self.cursor.shard + 1, row=0)
            if cursor.shard == len(self._shards):
                if not self._has_rows:
                    raise DataError(self._shards.path, "none of its shards has a row", "Add rows")
                cursor, self._has_rows = replace(cursor, shard=0, turn=cursor.turn + 1), False
            self.cursor = cursor
            self.close()
        self._has_rows = True
        self.cursor = replace(self.cursor, row=self.cursor.row + 1)
        location, value = item
        return parse_row(value, location, self._source.format, self._columns)

    def _next_in_shard(self) -> tuple[str, Any] | None:
        """Return the current shard's next row, or None at the end of the shard. Retry after an error."""
        order = np.random.default_rng((*self._seed, self.cursor.turn)).permutation(len(self._shards))
        for attempt in range(NUM_ATTEMPTS):
            try:
                if self._rows is None:
                    self._rows = self._shards.rows(int(order[self.cursor.shard]), self.cursor.row)
                return next(self._rows, None)
            except ShardError as error:
                self.close()
                if attempt + 1 == NUM_ATTEMPTS:
                    raise
                pause_s = _FIRST_RETRY_S * 2**attempt
                self._on_message(f"warning: {error}. Retrying in {pause_s:g} s")
                time.sleep(pause_s)
        raise AssertionError(NUM_ATTEMPTS)

    def close(self) -> None:
        """Close the current shard."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None


def _has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    return name.lower().endswith(tuple(suffixes))


def _strip_compression(name: str) -> str:
    return name.rpartition(".")[0] if _has_suffix(name, _COMPRESSION_SUFFIXES) else name


def _common_folder(names: Sequence[str]) -> str:
    first_parts, last_parts = min(names).split("/"), max(names).split("/")
    pairs = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first_parts, last_parts, strict=False)))
    return "/".join(part for part, _ in pairs)


def _open_decompressed(path: str, file: Any) -> IO[bytes]:
    if _has_suffix(path, (".gz",)):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if not _has_suffix(path, _COMPRESSION_SUFFIXES):
        return file if hasattr(file, "readline") else io.BufferedReader(file, _BLOCK_BYTES)
    pyarrow = import_pyarrow(path, "such files")
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return io.BufferedReader(stream, _BLOCK_BYTES)
