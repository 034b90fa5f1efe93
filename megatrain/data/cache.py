"""Cache of tokenized datasets. Entries are keyed by their sources' contents, written atomically and memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from megatrain.data.encoding import ARRAYS, TokenWriter
from megatrain.data.files import read_error, suffix_of
from megatrain.data.rows_report import DataError, DataReport
from megatrain.data.token_dataset import TokenDataset
from tiered.ext import lock, replace_file
from tiered.units import MiB, format_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.chat import TrainOn
    from megatrain.data.encoding import EncodingOptions
    from megatrain.data.table import DatasetConfig

_VERSION = 6
#: File name of each array in a cache entry.
_FILE_NAMES = {name: f"{name}.{np.dtype(dtype).name}" for name, dtype in ARRAYS.items()} | {"images": "images.bytes"}
_MANIFEST = "manifest.json"
_PARTIAL_SUFFIX, _REMOVED_SUFFIX, _LOCK_SUFFIX = ".partial", ".removed", ".lock"
_CHECKSUMS = "checksums"
_READ_BYTES = 4 * MiB
_MIN_AGE_S = 2.0  # do not store checksums of younger files: a later change might keep the same mtime

Encode = Callable[[TokenWriter], tuple[DataReport, tuple[int, ...]]]


def cache_folder(cache_dir: str, on_message: Callable[[str], None]) -> Path | None:
    """Create and return the folder for tokenized data, as set by ``data.cache_dir``. Return None to keep tokens in RAM.

    Raises:
        DataError: The configured folder is not writable. A default folder that is not writable is not an error.
    """
    if cache_dir == "none":
        return None
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if os.path.isabs(cache_home) else Path(os.path.expanduser("~")) / ".cache"
    folder = base / "megatrain-tier" / "tokens" if cache_dir == "auto" else Path(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        _check_locking(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        if cache_dir != "auto":
            raise DataError(str(folder), f"data.cache_dir cannot be written: {reason}", "Name another folder") from None
        on_message(
            f"{folder} cannot be written ({reason}): tokens are kept in RAM. data.cache_dir names another folder"
        )
        return None
    return folder


def _check_locking(folder: Path) -> None:
    """Raise ``LockingError`` if the folder's file system does not support file locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):
            lock(fd, folder, shared=True)
    finally:
        os.close(fd)


class TokenCache:
    """Cache of tokenized datasets in a folder. Several processes can use the folder at the same time.

    Args:
        folder: An existing folder.
        max_nbytes: Maximum size in bytes, or None for no limit. The cache evicts the least recently used entries.
        on_message: Called with a message when the cache waits for another process.
    """

    def __init__(
        self, folder: Path, *, max_nbytes: int | None = None, on_message: Callable[[str], None] = lambda text: None
    ) -> None:
        self._folder = folder
        self._max_nbytes = max_nbytes
        self._on_message = on_message

    def get(self, key: str, encode: Encode) -> TokenDataset:
        """Return an entry. If the entry is missing, create it, or wait until another process has created it.

        Args:
            key: Name of the entry, from :func:`cache_key`.

        Raises:
            DataError: ``encode`` raised it, the entry cannot be written, or the entry exceeds ``max_nbytes``.
        """
        dataset = self._open_entry(key)
        if dataset is not None:
            return dataset
        with self._lock(key):
            dataset = self._open_entry(key)
            if dataset is None:
                try:
                    self._create_entry(key, encode)
                except OSError as error:
                    self._remove_folder(self._folder / (key + _PARTIAL_SUFFIX))
                    raise DataError(
                        str(self._folder),
                        f"tokenized data cannot be written: {error.strerror or error}",
                        "Free space, or name another folder as data.cache_dir",
                    ) from error
                dataset = self._open_entry(key)
        assert dataset is not None, key
        return dataset

    def file_checksum(self, file: Path) -> str:
        """Return the checksum of a file's contents. Reuse the stored checksum if size, mtime and inode are unchanged.

        Raises:
            DataError: The file cannot be read.
        """
        try:
            stat = file.stat()
        except OSError as error:
            raise read_error(file, error) from None
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev]
        name = xxhash.xxh3_64(os.fsencode(file.absolute())).hexdigest()
        record_path = self._folder / _CHECKSUMS / f"{name}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(record_path.read_text(encoding="utf-8"))
            if record["stamp"] == stamp:
                return str(record["checksum"])
        checksum = read_checksum(file)
        if time.time() - stat.st_mtime > _MIN_AGE_S:
            with contextlib.suppress(OSError):
                record_path.parent.mkdir(exist_ok=True)
                replace_file(record_path, json.dumps({"stamp": stamp, "checksum": checksum}))
        return checksum

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Hold the lock of an entry. The operating system releases the lock if the process dies."""
        path = self._folder / (key + _LOCK_SUFFIX)
        with path.open("w") as file:
            try:
                lock(file.fileno(), path)
            except BlockingIOError:
                self._on_message("another process tokenizes the same data; waiting for it")
                lock(file.fileno(), path, blocking=True)
            yield

    def _create_entry(self, key: str, encode: Encode) -> None:
        """Write an entry under a temporary name, then rename it, so that a crash never leaves a partial entry."""
        partial_folder, final_folder = self._folder / (key + _PARTIAL_SUFFIX), self._folder / key
        self._remove_folder(partial_folder)
        self._remove_folder(final_folder)  # `get` could not open an existing folder, so it is damaged or outdated
        partial_folder.mkdir()
        try:
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context((partial_folder / _FILE_NAMES[name]).open("wb")) for name in ARRAYS]
                writer = TokenWriter(files, lambda nbytes: self._evict_entries(nbytes, key))
                report, source_starts = encode(writer)
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            manifest = {
                "version": _VERSION,
                "num_tokens": writer.num_tokens,
                "num_documents": writer.num_documents,
                "num_image_bytes": writer.num_image_bytes,
                "largest_id": writer.largest_id,
                "content": writer.checksum,
                "source_starts": source_starts,
                "report": report.to_json(),
            }
            replace_file(partial_folder / _MANIFEST, json.dumps(manifest), durable=True)
            os.rename(partial_folder, final_folder)
        except BaseException:
            self._remove_folder(partial_folder)
            raise

    def _open_entry(self, key: str) -> TokenDataset | None:
        """Open an entry and update its time of last use. Return None if there is no complete entry of this version."""
        folder = self._folder / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["version"] != _VERSION:
                return None
            dataset = TokenDataset(
                **_map_arrays(folder, manifest["num_tokens"], manifest["num_documents"], manifest["num_image_bytes"]),
                report=DataReport.from_json(manifest["report"]),
                source_starts=tuple(manifest["source_starts"]),
                content_checksum=manifest["content"],
                known_largest_id=manifest["largest_id"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(folder / _MANIFEST)
        return dataset

    def _evict_entries(self, nbytes: int, key: str) -> None:
        """Evict the least recently used entries until the cache has space for an entry of ``nbytes``."""
        if self._max_nbytes is None:
            return
        entries = []
        for folder in self._folder.iterdir():
            if folder.name not in (key, key + _PARTIAL_SUFFIX, _CHECKSUMS):
                with contextlib.suppress(OSError):
                    mtime_ns = (folder / _MANIFEST).stat().st_mtime_ns
                    entries.append((mtime_ns, folder, sum(file.stat().st_size for file in folder.iterdir())))
        entries.sort(reverse=True)
        while entries and nbytes + sum(size for _, _, size in entries) > self._max_nbytes:
            self._remove_folder(entries.pop()[1])
        if nbytes > self._max_nbytes:
            raise DataError(
                str(self._folder),
                f"the tokenized data is larger than data.max_cache_size = {format_size(self._max_nbytes)}",
                'Raise it (5 bytes for each token and 10 for each document), or write cache_dir = "none"',
            )

    def _remove_folder(self, folder: Path) -> None:
        """Rename and delete a folder, so that no process opens a partly deleted entry. Mapped files stay readable."""
        if not folder.exists():
            return
        trash_folder = folder.with_name(f"{folder.name}{_REMOVED_SUFFIX}-{os.getpid()}")
        with contextlib.suppress(OSError):
            os.rename(folder, trash_folder)
        shutil.rmtree(trash_folder, ignore_errors=True)


def read_checksum(file: Path) -> str:
    """Return the checksum of a file's contents. Raises DataError if the file cannot be read."""
    digest = xxhash.xxh3_64()
    try:
        with file.open("rb", buffering=0) as stream:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise read_error(file, error) from None
    return digest.hexdigest()


def _map_arrays(folder: Path, num_tokens: int, num_documents: int, num_image_bytes: int) -> dict[str, Any]:
    """Memory-map the arrays of an entry. Raises ValueError if a file has the wrong size."""
    counts = {
        "tokens": num_tokens,
        "trained": num_tokens,
        "starts": num_documents + 1,
        "begins_row": num_documents,
        "images": num_image_bytes,
        "image_starts": num_documents + 1,
        "roles": num_documents,
    }
    arrays: dict[str, Any] = {}
    for name, dtype in ARRAYS.items():
        path, count = folder / _FILE_NAMES[name], counts[name]
        if path.stat().st_size != count * np.dtype(dtype).itemsize:
            raise ValueError(f"{path} has {path.stat().st_size} bytes")
        # An empty file cannot be memory-mapped.
        arrays[name] = np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
    return arrays


#: Version of the encoding. Increase it whenever a code change makes the same rows produce different tokens.
ENCODING_VERSION = 3


def cache_key(
    sources: Sequence[DatasetConfig],
    files: Sequence[Sequence[Path]],
    tokenizer: PreTrainedTokenizerFast,
    train_on: TrainOn,
    options: EncodingOptions,
    cache: TokenCache,
    image_processor: str = "",
) -> str:
    """Return a key of 32 hex digits, computed from everything that affects the sources' tokens.

    The key depends on the files' contents and order, but not on their names. It depends on their folders only if rows
    have images, because image paths are relative to the data file.

    Args:
        cache: Cache of file checksums.
        image_processor: Description of the image processor, or "" if no row has images.
    """
    source_parts = [
        {
            "files": [[suffix_of(file), cache.file_checksum(file)] for file in paths],
            "format": source.format,
            "columns": dict(source.columns),
            "max_samples": source.max_samples,
            **({} if source.json_key is None else {"json_key": source.json_key}),
        }
        for source, paths in zip(sources, files, strict=True)
    ]
    parts = {
        "encoding": ENCODING_VERSION,
        "libraries": {name: version(name) for name in ("transformers", "tokenizers")},
        "tokenizer": _tokenizer_parts(tokenizer),
        "sources": source_parts,
        "only_text": options.kind.is_text,
        "joins_texts": options.join_texts,
        "options": [train_on, options.max_length, options.overlong, options.bad_rows],
    }
    if options.kind.key_name:
        parts["preferences"] = options.kind.key_name
    if image_processor:
        folders = [[str(file.absolute().parent) for file in paths] for paths in files]
        parts["images"] = [image_processor, folders, version("pillow")]
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _tokenizer_parts(tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    """Return a cache key's parts for the tokenizer: checksum of vocabulary and rules, special tokens, and template."""
    rules = tokenizer.backend_tokenizer.to_str().encode()
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [hashlib.sha256(rules).hexdigest(), special_tokens, tokenizer.chat_template]
