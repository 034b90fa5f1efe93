"""Shards of a streamed source: files in a folder or at a URL, each read from any of its rows on, none of them whole."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import numpy as np

from megatrain.data.files import EXTRA, LINE_PER_ROW, MAX_ROW_BYTES, too_large, unpacked_rows
from megatrain.data.rows_report import DataError
from tiered.units import MiB, format_size

__all__ = ["Shard", "ShardError", "Shards"]

#: How the names of shards end, but for those of MDS, which an index names.
_LINES, _PARQUET = (".jsonl", ".ndjson"), (".parquet",)
_PACKED = (".gz", ".zst", ".zstd")
_INDEX_NAME = "index.json"
_READ_AS = ".jsonl (also with .gz, .zst or .zstd behind it), .parquet, and folders of MDS shards with their index.json"
_BLOCK_BYTES = 8 * MiB
_ROWS_OF_BATCH = 256
#: A shard of MDS is held whole: who wrote it chose its size, 64 MiB where nothing else was said.
_MAX_MDS_BYTES = 1 << 30
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_GLOB = re.compile(r"[*?\[]")


class ShardError(DataError):
    """A shard could not be read to its end: it may be another time."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of rows.

    Attributes:
        path: for its file system.
        name: without what all shards of the source begin with.
        nbytes: size as it lies there.
        mds: its entry in the index; empty: it is no shard of MDS.
    """

    path: str
    name: str
    nbytes: int
    mds: Mapping[str, Any] = field(default_factory=dict)


class Shards:
    """The shards of a source, sorted by name.

    Args:
        path: A folder, a file, a pattern, or a URL of one of them that fsspec opens. A folder counts with those in it.

    Raises:
        DataError: it cannot be reached, nothing is there, or nothing that can be read row by row.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        protocol = path.partition("://")[0] if "://" in path else ""
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(path, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(protocol)
            advice = f"pip install {package}" if package else "Write the path of a folder, or a URL that fsspec knows"
            raise DataError(path, f"it cannot be opened: {error}", advice) from None
        try:
            self.shards = self._found()
        except DataError:
            raise
        except Exception as error:  # of whatever fsspec opens
            raise self._unreadable(path, error) from error

    def __len__(self) -> int:
        return len(self.shards)

    def describe(self) -> list[tuple[str, int]]:
        """Return what tells these shards from others: names and sizes. Their contents are not read."""
        return [(shard.name, shard.nbytes) for shard in self.shards]

    def rows(self, index: int, start: int) -> Generator[tuple[str, Any]]:
        """Yield (where, value) of the rows of a shard, from number ``start`` on.

        Raises:
            ShardError: it cannot be read.
            DataError: what it holds is damaged.
        """
        shard = self.shards[index]
        read = self._mds_rows if shard.mds else self._parquet_rows if _ends(shard.path, _PARQUET) else self._lines
        try:
            with closing(read(shard, start)) as rows:
                yield from rows
        except DataError:
            raise
        except Exception as error:
            raise self._unreadable(shard.path, error) from error

    # -- which there are -------------------------------------------------------------------------------------------

    def _found(self) -> list[Shard]:
        files, root = self._files, self._root
        if _GLOB.search(root):
            listed = files.glob(root, detail=True)
        else:
            listed = files.find(root, detail=True)
            index = [name for name in listed if name.rpartition("/")[2] == _INDEX_NAME]
            if index:
                return [shard for name in sorted(index) for shard in self._of_index(name)]
        sizes = {name: int(info.get("size") or 0) for name, info in listed.items() if info.get("type") != "directory"}
        if not sizes:
            raise DataError(self.path, "there is no such file or folder, or nothing in it", "Check the path")
        names = [name for name in sorted(sizes) if _ends(_unpacked(name), _LINES) or _ends(name, _PARQUET)]
        if not names:
            raise DataError(
                self.path, f"nothing there can be read as a stream, such as '{min(sizes)}'", f"Shards are {_READ_AS}"
            )
        common = len(names[0].rpartition("/")[0]) if len(names) == 1 else len(_common_folder(names))
        return [Shard(name, name[common:].lstrip("/"), sizes[name]) for name in names]

    def _of_index(self, name: str) -> Iterator[Shard]:
        folder = name.rpartition("/")[0]
        try:
            entries = json.loads(self._files.cat_file(name))["shards"]
            for entry in entries:
                if entry["format"] != "mds":
                    raise DataError(name, f'its shards are of format "{entry["format"]}"', f"Shards are {_READ_AS}")
                there = entry["zip_data"] or entry["raw_data"]
                base = str(there["basename"])
                if "/" in base or base.startswith(".."):
                    raise DataError(name, f"it names the shard '{base}', which would lie elsewhere")
                relative = f"{folder[len(self._root) :]}/{base}".lstrip("/")
                yield Shard(f"{folder}/{base}", relative, int(there["bytes"]), entry)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(name, f"this is no index of MDS shards: {error!r}", "Write the data set again") from None

    # -- rows of one -------------------------------------------------------------------------------------------------

    def _lines(self, shard: Shard, start: int) -> Generator[tuple[str, Any]]:
        with (
            self._files.open(shard.path, "rb", block_size=_BLOCK_BYTES) as file,
            _decompressed(shard.path, file) as text,
        ):
            row = 0
            for number, raw in enumerate(iter(partial(text.readline, MAX_ROW_BYTES + 1), b""), start=1):
                where = f"{shard.path} line {number}"
                if len(raw) > MAX_ROW_BYTES:
                    raise too_large(where)
                if not raw.strip():
                    continue
                row += 1
                if row > start:
                    yield where, _parsed(raw, where)

    def _parquet_rows(self, shard: Shard, start: int) -> Generator[tuple[str, Any]]:
        pyarrow = _pyarrow(shard.path)
        with self._files.open(shard.path, "rb", block_size=_BLOCK_BYTES) as file:
            parquet, first = pyarrow.parquet.ParquetFile(file), 0
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if first + count > start:
                    at = first
                    for batch in parquet.iter_batches(_ROWS_OF_BATCH, row_groups=[group]):
                        skip = min(max(0, start - at), batch.num_rows)
                        number = itertools.count(at + skip + 1)
                        for value in unpacked_rows(batch.slice(skip), shard.path, at + skip + 1):
                            yield f"{shard.path} row {next(number)}", value
                        at += batch.num_rows
                first += count

    def _mds_rows(self, shard: Shard, start: int) -> Generator[tuple[str, Any]]:
        nbytes = int(shard.mds["raw_data"]["bytes"])
        if nbytes > _MAX_MDS_BYTES:
            raise DataError(
                shard.path,
                f"a shard of MDS is held whole, and this one has {format_size(nbytes)}",
                f"Write shards of at most {format_size(_MAX_MDS_BYTES)} (size_limit)",
            )
        data = self._files.cat_file(shard.path)
        if shard.mds["zip_data"]:
            kind = str(shard.mds["compression"]).partition(":")[0]
            if kind not in ("zstd", "gz"):
                raise DataError(shard.path, f'its compression "{kind}" is not read', "Write it with zstd, or without")
            with _decompressed(".zst" if kind == "zstd" else ".gz", io.BytesIO(data)) as file:
                data = file.read(nbytes + 1)
        if len(data) != nbytes:
            raise DataError(shard.path, f"it has {len(data)} bytes, and its index says {nbytes}", "Fetch it again")
        count = int(np.frombuffer(data, "<u4", 1)[0])
        if count != int(shard.mds["samples"]):
            raise DataError(shard.path, f"it has {count} rows, and its index says {shard.mds['samples']}")
        offsets = np.frombuffer(data, "<u4", count + 1, 4)
        decoders = [_decoder(kind) for kind in shard.mds["column_encodings"]]
        columns = list(zip(shard.mds["column_names"], shard.mds["column_sizes"], decoders, strict=True))
        for row in range(start, count):
            where, sample = f"{shard.path} row {row + 1}", data[offsets[row] : offsets[row + 1]]
            try:
                yield where, _sample(sample, columns)
            except (ValueError, IndexError) as error:
                raise DataError(where, f"this is no row of its columns: {error}", "Fetch the shard again") from None

    def _unreadable(self, path: str, error: Exception) -> ShardError:
        text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        names = [each.__name__ for each in type(error).__mro__]
        advice = "Check the path, and that it can be read"
        if "NoCredentialsError" in names or "locate credentials" in text:
            advice = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return ShardError(path, f"it cannot be read: {text}", advice)


def _ends(name: str, endings: Sequence[str]) -> bool:
    return name.lower().endswith(tuple(endings))


def _unpacked(name: str) -> str:
    return name.rpartition(".")[0] if _ends(name, _PACKED) else name


def _common_folder(names: Sequence[str]) -> str:
    first, last = min(names).split("/"), max(names).split("/")
    same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return "/".join(part for part, _ in same)


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        advice = LINE_PER_ROW if raw.strip() == b"{" else "Fix or remove the line"
        raise DataError(where, f"this is no JSON: {error}", advice) from None


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(path, "such files need pyarrow", f"Install the data extra: {EXTRA}") from None
    return pyarrow


class _Raw(io.RawIOBase):
    """A stream of pyarrow as one of Python, of which lines can be read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _decompressed(path: str, file: Any) -> IO[bytes]:
    if _ends(path, (".gz",)):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if not _ends(path, _PACKED):
        return file if hasattr(file, "readline") else io.BufferedReader(file, _BLOCK_BYTES)
    pyarrow = _pyarrow(path)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return io.BufferedReader(_Raw(stream), _BLOCK_BYTES)


# -- MDS: rows of MosaicML's streaming --------------------------------------------------------------------------------
#
# A shard is the number of its rows (uint32), where each begins and where the last one ends (uint32), some JSON that
# repeats the index, and the rows. A row is the sizes (uint32) of those of its values whose columns have none, and the
# values one after the other.

_Columns = Sequence[tuple[str, int | None, Callable[[bytes], Any]]]
_SCALARS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
#: Of arrays whose column does not say it: the byte before the values -> their type.
_ARRAY_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


def _sample(data: bytes, columns: _Columns) -> dict[str, Any]:
    open_sizes = [name for name, size, _ in columns if not size]
    sizes = iter(np.frombuffer(data, "<u4", len(open_sizes)).tolist())
    at, found = 4 * len(open_sizes), dict[str, Any]()
    for name, size, decode in columns:
        end = at + (size or next(sizes))
        if end > len(data):
            raise ValueError(f"`{name}` would end behind it")
        found[name] = decode(data[at:end])
        at = end
    return found


def _decoder(encoding: str) -> Callable[[bytes], Any]:
    kind, _, rest = encoding.partition(":")
    if kind == "int":
        kind = "int64"
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, f"<{np.dtype(kind).str[1:]}", 1)[0].item()
    if kind == "str":
        return lambda data: data.decode("utf-8")
    if kind == "json":
        return lambda data: json.loads(data)
    if kind in ("str_int", "str_float"):
        return lambda data: (int if kind == "str_int" else float)(data.decode("utf-8"))
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        return partial(_array, dtype=dtype, is_fixed=bool(shape))
    return lambda data: None  # bytes, images, and what only pickle could read: no text


def _array(data: bytes, *, dtype: str, is_fixed: bool) -> list[Any]:
    """Return the values of an array, flat; texts of tokens have one dimension."""
    at = 0
    if not dtype:
        dtype, at = _ARRAY_TYPES[data[0]], 1
    if not is_fixed:
        ndim, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = np.frombuffer(data, f"<u{width}", ndim, at + 1)
        at += 1 + ndim * width
        count = math.prod(shape.tolist())
    else:
        count = (len(data) - at) // np.dtype(dtype).itemsize
    return list(np.frombuffer(data, f"<{np.dtype(dtype).str[1:]}", count, at).tolist())
