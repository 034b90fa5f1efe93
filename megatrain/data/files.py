"""Discovery of data files, and iteration over their rows."""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from megatrain.data.messages import describe_json_error, type_name
from megatrain.data.rows_report import DataError
from tiered.errors import install_command
from tiered.units import MiB, format_size

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt")
ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
_FORMATS = ".jsonl (one object per line), .json (a list of objects), .csv, .tsv, .txt, .parquet and .arrow"
#: File names of MosaicML streaming shards, compressed or not.
_MDS_PATTERN = re.compile(r"\.mds(\.(zstd?|gz|br|bz2|snappy))?$", re.IGNORECASE)
_SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
_METADATA_FILES = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")
_NESTED_LIST_KEYS = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected", "tools")
_PIECE_CHARACTERS = 1 << 22  # text files can be larger than RAM, so they are read in pieces of about this size
_MAX_BATCH_ROWS = 256
_TEXT_TYPES = ("STRING", "JSON", "ENUM", "NONE")  # logical types of parquet columns that contain texts or bytes
#: Bytes of RAM per value in a list, including the value's share of the list's offsets.
_BYTES_PER_NESTED_VALUE = 16
#: Maximum decompressed size of a row. Without this limit, a small untrusted file could fill the RAM.
MAX_ROW_BYTES = 256 * MiB
#: Bytes of RAM needed per byte of a JSON list. RAM holds both the text and the parsed objects.
_BYTES_PER_LIST_CHARACTER = 8


def suffix_of(file: Path) -> str:
    """Return a file's suffix in lower case, without a trailing ``.gz``."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [".gz"]:
        return suffixes[-2] if suffixes[-2:-1] and suffixes[-2] in TEXT_SUFFIXES else ".gz"
    return suffixes[-1] if suffixes else ""


def find_files(path: str, split: str | None = None) -> list[Path]:
    """Return the sorted data files at a file path, glob pattern or folder.

    Args:
        split: Select only files whose name or subfolder contains this word. None selects all files, or only the
            split "train" if the folder has several splits.

    Raises:
        DataError: No file matches, a file's format is not supported, or the folder has several splits but no "train".
    """
    base = Path(path)
    if base.is_dir():
        return _select_split(base, _find_in_folder(base), split)
    if base.is_file():
        files = [base]
    elif glob.has_magic(path):
        files = sorted(Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file())
        if not files:
            raise DataError(path, "no file matches", "Check the pattern; it is relative to the config file")
    else:
        raise DataError(path, "there is no such file or folder", "Check the path; it is relative to the config file")
    if split not in (None, "train"):
        raise DataError(path, f'split = "{split}" needs a folder or a dataset of the hub', "Remove split")
    reject_mds(map(str, files))
    for file in files:
        if suffix_of(file) not in (*TEXT_SUFFIXES, *ARROW_SUFFIXES):
            raise DataError(
                str(file), f'"{file.suffix or file.name}" files are not supported', f"Supported files: {_FORMATS}"
            )
    return files


def reject_mds(names: Iterable[str]) -> None:
    """Raise DataError if one of the files is a MosaicML streaming shard."""
    for name in names:
        if _MDS_PATTERN.search(name):
            raise DataError(
                name,
                "MDS shards are not supported",
                "Convert them to .jsonl or .parquet: write each row of streaming.StreamingDataset as one line of JSON",
            )


def _find_in_folder(folder: Path) -> list[Path]:
    files = []
    for file in folder.rglob("*"):
        if _MDS_PATTERN.search(file.name) and file.is_file():
            reject_mds([str(file)])
        elif (
            suffix_of(file) in (*TEXT_SUFFIXES, *ARROW_SUFFIXES) and file.name not in _METADATA_FILES and file.is_file()
        ):
            files.append(file)
    if not files:
        raise DataError(str(folder), "the folder contains no data file", f"Supported files: {_FORMATS}")
    return sorted(files)


def _select_split(folder: Path, files: list[Path], split: str | None) -> list[Path]:
    def has_name(file: Path, name: str) -> bool:
        words = re.split(r"[^a-z0-9]+", file.relative_to(folder).as_posix().lower())
        return name.lower() in words or name in file.relative_to(folder).parts

    if split is not None:
        matches = [file for file in files if has_name(file, split)]
        if not matches:
            names = ", ".join(name for name in _SPLITS if any(has_name(file, name) for file in files)) or "none"
            raise DataError(str(folder), f'no file in the folder belongs to split "{split}"', f"Splits found: {names}")
        return matches
    splits = {name: [file for file in files if has_name(file, name)] for name in _SPLITS}
    options = [name for name in _SPLITS if splits[name]]
    if len(options) > 1 and len({file for name in options for file in splits[name]}) == len(files):
        if "train" not in options:
            raise DataError(
                str(folder), f"the folder contains several splits: {', '.join(options)}", f'Set split = "{options[0]}"'
            )
        return splits["train"]
    return files


def read_file(file: Path, json_key: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) for each row of a file that is not a .txt file. The values are not validated.

    Args:
        json_key: Dotted key of the list of rows in a .json file that contains one object. None to search for the list,
            which fails if there are several lists.

    Raises:
        DataError: The file cannot be read or is damaged.
    """
    suffix = suffix_of(file)
    if json_key is not None and suffix != ".json":
        raise DataError(str(file), f'json_key = "{json_key}" is only for .json files', "Remove it")
    if suffix in ARROW_SUFFIXES:
        return _arrow_rows(file, suffix)
    if suffix in (".csv", ".tsv"):
        return _csv_rows(file, "," if suffix == ".csv" else "\t")
    return _json_lines(file) if suffix == ".jsonl" else _json_list(file, json_key)


def read_text(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield (piece, is_last) for each piece of a text file. Pieces end between lines if possible, else between words.

    Raises:
        DataError: The file cannot be read or is not UTF-8.
    """
    buffer = ""
    for text in _decode_file(file):
        buffer += text
        if len(buffer) >= _PIECE_CHARACTERS:
            cut = _find_cut(buffer)
            yield buffer[:cut], False
            buffer = buffer[cut:]
    yield buffer, True


def _decode_file(file: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces. Every line end is converted to a line feed."""
    decoder, line_ends = codecs.getincrementaldecoder("utf-8-sig")(), io.IncrementalNewlineDecoder(None, translate=True)
    num_read = 0
    with _open(file) as stream:
        while True:
            try:
                raw = stream.read(_PIECE_CHARACTERS)
            except (OSError, EOFError) as error:
                raise read_error(file, error) from None
            start = num_read - len(decoder.getstate()[0])
            try:
                yield line_ends.decode(decoder.decode(raw, final=not raw), final=not raw)
            except UnicodeDecodeError as error:
                raise _utf8_error(file, error, start) from None
            if not raw:
                return
            num_read += len(raw)


def _find_cut(text: str) -> int:
    """Return the index at which to split a text: after its last line end, else before its last space, else its end."""
    return text.rfind("\n") + 1 or max(text.rfind(" "), 0) or len(text)


def _open(file: Path) -> IO[bytes]:
    try:
        return gzip.open(file, "rb") if file.suffix.lower() == ".gz" else file.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise read_error(file, error) from None


def read_error(file: Path, error: Exception) -> DataError:
    """Return the DataError for a file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(str(file), f"the file cannot be read: {reason}", "Check its permissions, or fetch it again")


def _utf8_error(file: Path, error: UnicodeDecodeError, start: int = 0) -> DataError:
    return DataError(str(file), f"the file is not UTF-8 text (byte {start + error.start})", "Convert it to UTF-8")


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with _open(file) as stream:
        try:
            yield from json_lines(stream, str(file))
        except (OSError, EOFError) as error:
            raise read_error(file, error) from None


def json_lines(stream: IO[bytes], name: str, start: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) for each line of a stream, starting at row ``start``. Empty lines do not count as rows.

    Raises:
        DataError: A line is damaged or too long.
        OSError: The stream cannot be read.
    """
    row = 0
    for line_number, raw in enumerate(iter(partial(stream.readline, MAX_ROW_BYTES + 1), b""), start=1):
        location = f"{name} line {line_number}"
        if len(raw) > MAX_ROW_BYTES:
            raise size_error(location)
        try:
            line = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 text (byte {error.start} of the line)"
            raise DataError(location, problem, "Convert it to UTF-8") from None
        if line.strip():
            row += 1
            if row > start:
                yield location, _parse_line(line, location)


def _parse_line(line: str, location: str) -> Any:
    try:
        return json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        start = line.strip()[:40]
        if line.strip() in ("[", "[{") or line.lstrip().startswith("[{"):
            problem = "this is a JSON list, not one object per line"
            raise DataError(location, problem, "Rename the file to .json") from None
        if start == "{":
            advice = "Write one object per line (jq -c . FILE), or a list of objects in a .json file"
            raise DataError(location, "the object spans several lines", advice) from None
        raise DataError(
            location, f"broken JSON {_describe_parse_error(error)}. The line begins: {start}", "Fix or remove the line"
        ) from None


def _describe_parse_error(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return describe_json_error(error)
    return "nested too deeply" if isinstance(error, RecursionError) else "with a number of too many digits"


def _json_list(file: Path, json_key: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a .json file that fits in RAM: a list, an object with a list, or one object per line."""
    with _open(file) as stream:
        try:
            max_bytes = psutil.virtual_memory().available // _BYTES_PER_LIST_CHARACTER
            data = stream.read(max_bytes + 1)  # limit the read, because a .gz file's decompressed size is unknown
            if len(data) > max_bytes:
                raise DataError(
                    str(file),
                    f"the list has more than {format_size(max_bytes)}, which is too large for this machine's RAM",
                    "Write one object per line, and name the file .jsonl",
                )
            text = data.decode("utf-8-sig")
            del data
        except UnicodeDecodeError as error:
            raise _utf8_error(file, error) from None
        except (OSError, EOFError) as error:
            raise read_error(file, error) from None
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _json_lines(file)
            return
        location = f"{file} line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(file)
        raise DataError(location, f"broken JSON {_describe_parse_error(error)}", "Fix the file") from None
    for row_number, value in enumerate(_find_rows(file, rows, json_key), start=1):
        yield f"{file} row {row_number}", value


def _find_rows(file: Path, value: object, json_key: str | None) -> list[Any]:
    """Return the list of rows in a parsed .json file. The file is the list, or an object that contains the list."""
    if isinstance(value, list) and json_key is None:
        return value
    lists = dict(_find_lists(value))
    if json_key is not None:
        if json_key in lists:
            return lists[json_key]
        keys = ", ".join(f"`{key}`" for key in lists) or "none"
        raise DataError(str(file), f"there is no list of rows at `{json_key}`", f"Lists of rows found: {keys}")
    outer_lists = {key: rows for key, rows in lists.items() if key.rpartition(".")[2] not in _NESTED_LIST_KEYS}
    if len(outer_lists) == 1:
        return next(iter(outer_lists.values()))
    if outer_lists:
        keys = ", ".join(f"`{key}`" for key in outer_lists)
        advice = f'Set json_key next to this path, for example json_key = "{next(iter(outer_lists))}"'
        raise DataError(str(file), f"the file contains several lists of rows: {keys}", advice)
    description = "an object without such a list" if isinstance(value, dict) else type_name(value)
    raise DataError(str(file), f"a .json file must contain a list of rows, not {description}", "Wrap the rows in [ ]")


def _find_lists(value: object, key: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield (dotted key, list) for each list of objects inside nested objects."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and key:
        yield key, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _find_lists(child, f"{key}.{name}" if key else name)


def _csv_rows(file: Path, default_separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with _open(file) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = None
        try:
            line = text.readline()
            separator = _detect_separator(line, default_separator)
            reader = csv.reader(itertools.chain([line] if line else [], text), delimiter=separator, strict=True)
            header = next(reader, [])
            duplicates = sorted({name for name in header if header.count(name) > 1})
            if duplicates:
                raise DataError(f"{file} line 1", f"the column `{duplicates[0]}` occurs twice", "Rename or remove one")
            for row_number, cells in enumerate(reader, start=1):
                location = f"{file} row {row_number}"
                if not any(cells):
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{location} (line {reader.line_num})",
                        f"{len(cells)} cells for {len(header)} columns (separator: {_SEPARATOR_NAMES[separator]})",
                        "Put cells that contain the separator or a line break in double quotes",
                    )
                yield location, dict(zip(header, cells, strict=True))
        except UnicodeDecodeError as error:
            raise _utf8_error(file, error) from None
        except csv.Error as error:
            line_number = 1 if reader is None else reader.line_num
            raise DataError(f"{file} line {line_number}", f"broken CSV: {error}", "Fix the line") from None
        except (OSError, EOFError) as error:
            raise read_error(file, error) from None


_SEPARATOR_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs"}


def _detect_separator(header: str, default: str) -> str:
    """Return the default separator if it splits the header, else the separator that yields the most columns."""

    def count_columns(separator: str) -> int:
        try:
            return len(next(csv.reader([header], delimiter=separator), []))
        except csv.Error:
            return 0

    return default if count_columns(default) > 1 else max((default, *_SEPARATOR_NAMES), key=count_columns)


def _arrow_rows(file: Path, suffix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    pyarrow = import_pyarrow(str(file), f"{suffix} files")
    row_number = 0
    try:
        values = parquet_values(file, str(file)) if suffix == ".parquet" else _arrow_values(file)
        for value in values:
            row_number += 1
            yield f"{file} row {row_number}", value
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{file} row {row_number + 1}" if row_number else str(file),
            f"this {suffix} file cannot be read: {reason.rstrip('.')}",
            "Download or write it again",
        ) from None


def parquet_values(file: Any, name: str, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a parquet file's rows, starting at row ``start``. Decompress only a bounded number of bytes at a time.

    Args:
        file: Path or open file.
        name: Name of the file in error messages.
    """
    import pyarrow.parquet

    is_path = isinstance(file, Path)
    with pyarrow.parquet.ParquetFile(file, memory_map=is_path) as parquet:
        leaves = [parquet.schema.column(index) for index in range(len(parquet.schema))]
    # Read texts as dictionary indices. Otherwise a text that is stored only once would occupy RAM for every row or list
    # item that uses it.
    is_text = [leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type in _TEXT_TYPES for leaf in leaves]
    texts = [leaf.path for leaf, flag in zip(leaves, is_text, strict=True) if flag]
    row_number = 1
    with pyarrow.parquet.ParquetFile(file, memory_map=is_path, read_dictionary=texts) as parquet:
        for index in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(index)
            if row_number + group.num_rows <= start + 1:
                row_number += group.num_rows
                continue
            columns = [group.column(column) for column in range(group.num_columns)]
            nested_counts = [
                column.num_values for leaf, column in zip(leaves, columns, strict=True) if leaf.max_repetition_level
            ]
            # Large lists could fill the RAM. Skip this check for streams, whose rows must not depend on the free RAM.
            if is_path and sum(nested_counts) * _BYTES_PER_NESTED_VALUE > psutil.virtual_memory().available // 2:
                raise DataError(
                    f"{name} row {row_number}",
                    f"the row group of {group.num_rows:,} rows that starts here has {max(nested_counts):,} values in "
                    "lists, too many for this machine's RAM",
                    "Write the file with smaller row groups (row_group_size)",
                )
            nbytes = max(
                sum(column.total_uncompressed_size for column in columns), sum(nested_counts) * _BYTES_PER_NESTED_VALUE
            )
            batch_size = max(1, min(_MAX_BATCH_ROWS, MAX_ROW_BYTES * group.num_rows // max(1, nbytes)))
            for batch in parquet.iter_batches(batch_size=batch_size, row_groups=[index]):
                num_skipped = min(max(0, start + 1 - row_number), batch.num_rows)
                yield from unpack_rows(batch.slice(num_skipped), name, row_number + num_skipped)
                row_number += batch.num_rows


def unpack_rows(batch: Any, name: str, row_number: int) -> Iterator[dict[str, Any]]:
    """Yield a batch's rows as dicts. If the batch is larger than ``MAX_ROW_BYTES``, convert one row at a time.

    Args:
        row_number: Number of the batch's first row in error messages.
    """
    step = max(1, batch.num_rows) if _count_bytes(batch) <= MAX_ROW_BYTES else 1
    for start in range(0, batch.num_rows, step):
        rows = batch.slice(start, step)
        if step == 1 and _count_bytes(rows) > MAX_ROW_BYTES:
            raise size_error(f"{name} row {row_number + start}")
        nested_columns = [field.name for field in rows.schema if _has_objects(field.type)]
        for row in rows.to_pylist():
            yield row | {name: _drop_null_keys(row[name]) for name in nested_columns}


def _has_objects(arrow_type: Any) -> bool:
    """Return whether the values of an Arrow type are objects or lists of objects."""
    import pyarrow

    if pyarrow.types.is_struct(arrow_type):
        return True
    return hasattr(arrow_type, "value_type") and _has_objects(arrow_type.value_type)


def _drop_null_keys(value: Any) -> Any:
    """Return a value without null fields. Columnar formats add them to give all objects in a column the same keys."""
    if isinstance(value, dict):
        return {key: _drop_null_keys(child) for key, child in value.items() if child is not None}
    return [_drop_null_keys(child) for child in value] if isinstance(value, list) else value


def _count_bytes(rows: Any) -> int:
    """Return the size in bytes of all values in a batch or array. Text in a dictionary is counted once per use."""
    import pyarrow
    import pyarrow.compute

    if isinstance(rows, pyarrow.RecordBatch):
        return sum(map(_count_bytes, rows.columns))
    if pyarrow.types.is_dictionary(rows.type):
        values = rows.dictionary
        try:
            lengths = pyarrow.compute.binary_length(values).take(rows.indices)
        except pyarrow.ArrowNotImplementedError:  # binary_length only supports texts and bytes
            return len(rows) * (_count_bytes(values) // max(1, len(values)))
        return int(pyarrow.compute.sum(lengths.cast(pyarrow.int64())).as_py() or 0)
    if pyarrow.types.is_struct(rows.type):
        return sum(map(_count_bytes, rows.flatten()))
    if pyarrow.types.is_map(rows.type):
        start, stop = rows.offsets[0].as_py(), rows.offsets[-1].as_py()
        return sum(_count_bytes(part.slice(start, stop - start)) for part in (rows.keys, rows.items))
    if hasattr(rows, "flatten"):
        return _count_bytes(rows.flatten())
    return int(rows.nbytes)


def size_error(location: str) -> DataError:
    return DataError(location, f"the row has more than {format_size(MAX_ROW_BYTES)}", "Split or remove the row")


def _arrow_values(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow file (Feather 2) or an Arrow stream. The datasets library writes Arrow streams."""
    import pyarrow

    row_number = 1
    with pyarrow.memory_map(str(file)) as file_map:
        try:
            reader = pyarrow.ipc.open_file(file_map)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            file_map.seek(0)
            batches = iter(pyarrow.ipc.open_stream(file_map))
        for batch in batches:
            for start in range(0, batch.num_rows, _MAX_BATCH_ROWS):
                yield from unpack_rows(batch.slice(start, _MAX_BATCH_ROWS), str(file), row_number + start)
            row_number += batch.num_rows


def import_pyarrow(location: str, feature: str) -> Any:
    """Import and return pyarrow with its readers. Raises DataError if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError(location, f"{feature} need pyarrow", f"Install it: {install_command('data')}") from None
    return pyarrow
