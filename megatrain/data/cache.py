"""A cache folder of tokenized data. Entries are keyed by their source contents, complete or absent, and mapped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatrain.data.encoding import ARRAYS, TokenWriter
from megatrain.data.files import suffix_of, unreadable
from megatrain.data.rows_report import DataError, DataReport
from tiered.ext import lock
from tiered.units import MiB, format_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.data.chat import TrainOn
    from megatrain.data.encoding import EncodingOptions
    from megatrain.data.table import DatasetConfig

_VERSION = 6
#: Files of ``ARRAYS`` in an entry.
_FILES = {
    "tokens": "tokens.int32",
    "trained": "trained.bool",
    "starts": "starts.int64",
    "begins_row": "begins_row.bool",
    "images": "images.bytes",
    "image_starts": "image_starts.int64",
    "roles": "roles.uint8",
}
_MANIFEST = "manifest.json"
_PARTIAL, _REMOVED, _LOCK = ".partial", ".removed", ".lock"
_CHECKSUMS = "checksums"
_READ_BYTES = 4 * MiB
_SETTLED_S = 2.0  # a file with a more recent mtime may change again within one tick of its clock

Encode = Callable[[TokenWriter], tuple[DataReport, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One tokenized dataset.

    Attributes:
        arrays: Values of ``ARRAYS`` by name, mapped from files, so that unread parts cost no RAM.
        source_starts: first document of each source, and the end.
        content: checksum of the arrays.
    """

    arrays: Mapping[str, Any]
    report: DataReport
    source_starts: tuple[int, ...]
    content: str
    largest_id: int


def cache_folder(cache_dir: str, on_message: Callable[[str], None]) -> Path | None:
    """Return the folder of ``data.cache_dir``, created if missing; None if tokens are kept in RAM.

    Raises:
        DataError: the user named it and it cannot be written. An unwritable default folder only causes a message.
    """
    if cache_dir == "none":
        return None
    usual = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(usual) if os.path.isabs(usual) else Path(os.path.expanduser("~")) / ".cache"
    folder = base / "megatrain-tier" / "tokens" if cache_dir == "auto" else Path(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        _check_locks(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        if cache_dir != "auto":
            raise DataError(str(folder), f"data.cache_dir cannot be written: {reason}", "Name another folder") from None
        on_message(
            f"{folder} cannot be written ({reason}): tokens are kept in RAM. data.cache_dir names another folder"
        )
        return None
    return folder


def _check_locks(folder: Path) -> None:
    """Raise ``LockingError`` if the file system of a folder has no locks, which the creation of entries needs."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):
            lock(fd, folder, shared=True)
    finally:
        os.close(fd)


class TokenCache:
    """The entries of one folder. Several processes may use it at once; each file of an entry is written once.

    Args:
        folder: an existing folder.
        max_nbytes: Maximum bytes of all entries; the least recently used are removed first. None for no limit.
        on_message: called with a message while it waits for another process.
    """

    def __init__(
        self, folder: Path, *, max_nbytes: int | None = None, on_message: Callable[[str], None] = lambda text: None
    ) -> None:
        self._folder = folder
        self._max_nbytes = max_nbytes
        self._on_message = on_message

    def get(self, key: str, encode: Encode) -> CacheEntry:
        """Return an entry, created if it is missing. Waits while another process creates it.

        Args:
            key: name of the entry, a function of everything that determines its contents.

        Raises:
            DataError: raised by ``encode``, or the folder is full or too small.
        """
        found = self._open(key)
        if found is not None:
            return found
        with self._lock(key):
            found = self._open(key)
            if found is None:
                try:
                    self._make(key, encode)
                except OSError as error:
                    self._remove(self._folder / (key + _PARTIAL))
                    raise DataError(
                        str(self._folder),
                        f"tokenized data cannot be written: {error.strerror or error}",
                        "Free space, or name another folder as data.cache_dir",
                    ) from error
                found = self._open(key)
        assert found is not None, key
        return found

    def file_checksum(self, file: Path) -> str:
        """Return the checksum of a file's contents; read again only if its size, time or location has changed.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            state = file.stat()
        except OSError as error:
            raise unreadable(file, error) from None
        stamp = [state.st_size, state.st_mtime_ns, state.st_ino, state.st_dev]
        name = xxhash.xxh3_64(os.fsencode(file.absolute())).hexdigest()
        memory = self._folder / _CHECKSUMS / f"{name}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(memory.read_text(encoding="utf-8"))
            if known["stamp"] == stamp:
                return str(known["checksum"])
        found = read_checksum(file)
        if time.time() - state.st_mtime > _SETTLED_S:
            with contextlib.suppress(OSError):
                memory.parent.mkdir(exist_ok=True)
                _write_whole(memory, {"stamp": stamp, "checksum": found})
        return found

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Hold the lock of one entry; the system releases it if the process dies."""
        path = self._folder / (key + _LOCK)
        with path.open("w") as file:
            try:
                lock(file.fileno(), path)
            except BlockingIOError:
                self._on_message("another process tokenizes the same data; waiting for it")
                lock(file.fileno(), path, waits=True)
            yield

    def _make(self, key: str, encode: Encode) -> None:
        """Write an entry under a temporary name, then rename it, so that a crash leaves no partial entry."""
        partial, final = self._folder / (key + _PARTIAL), self._folder / key
        self._remove(partial)
        self._remove(final)  # damaged, or it would have been opened
        partial.mkdir()
        try:
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context((partial / _FILES[name]).open("wb")) for name in ARRAYS]
                writer = TokenWriter(files, lambda nbytes: self._make_room(nbytes, key))
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
                "content": writer.content,
                "source_starts": source_starts,
                "report": report.to_json(),
            }
            _write_whole(partial / _MANIFEST, manifest)
            os.rename(partial, final)
        except BaseException:
            self._remove(partial)
            raise

    def _open(self, key: str) -> CacheEntry | None:
        """Return a complete entry and record its use; None if there is none."""
        folder = self._folder / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["version"] != _VERSION:
                return None
            entry = CacheEntry(
                _map(folder, manifest["num_tokens"], manifest["num_documents"], manifest["num_image_bytes"]),
                DataReport.from_json(manifest["report"]),
                tuple(manifest["source_starts"]),
                manifest["content"],
                manifest["largest_id"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(folder / _MANIFEST)
        return entry

    def _make_room(self, nbytes: int, key: str) -> None:
        """Remove the least recently used entries until ``nbytes`` more fit."""
        if self._max_nbytes is None:
            return
        others = []
        for folder in self._folder.iterdir():
            if folder.name not in (key, key + _PARTIAL, _CHECKSUMS):
                with contextlib.suppress(OSError):
                    used = (folder / _MANIFEST).stat().st_mtime_ns
                    others.append((used, folder, sum(file.stat().st_size for file in folder.iterdir())))
        others.sort(reverse=True)
        while others and nbytes + sum(size for _, _, size in others) > self._max_nbytes:
            self._remove(others.pop()[1])
        if nbytes > self._max_nbytes:
            raise DataError(
                str(self._folder),
                f"the tokenized data is larger than data.max_cache_size = {format_size(self._max_nbytes)}",
                'Raise it (5 bytes for each token and 10 for each document), or write cache_dir = "none"',
            )

    def _remove(self, folder: Path) -> None:
        """Remove a folder atomically: rename, then delete. Processes that have mapped it keep their mapping."""
        if not folder.exists():
            return
        aside = folder.with_name(f"{folder.name}{_REMOVED}-{os.getpid()}")
        with contextlib.suppress(OSError):
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def read_checksum(file: Path) -> str:
    """Return the checksum of a file's contents.

    Raises:
        DataError: the file cannot be read.
    """
    digest = xxhash.xxh3_64()
    try:
        with file.open("rb", buffering=0) as stream:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise unreadable(file, error) from None
    return digest.hexdigest()


def _map(folder: Path, num_tokens: int, num_documents: int, num_image_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Map the arrays of an entry.

    Raises:
        ValueError: a file has the wrong size.
    """
    counts = {
        "tokens": num_tokens,
        "trained": num_tokens,
        "starts": num_documents + 1,
        "begins_row": num_documents,
        "images": num_image_bytes,
        "image_starts": num_documents + 1,
        "roles": num_documents,
    }
    found: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in ARRAYS.items():
        path, count = folder / _FILES[name], counts[name]
        if path.stat().st_size != count * np.dtype(dtype).itemsize:
            raise ValueError(f"{path} has {path.stat().st_size} bytes")
        # An empty file cannot be mapped.
        found[name] = np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
    return found


def _write_whole(path: Path, values: Any) -> None:
    """Write JSON atomically, so that readers never see a part of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


#: To be increased whenever the same rows produce other tokens or masks.
ENCODING = 3


def cache_key(
    sources: Sequence[DatasetConfig],
    files: Sequence[Sequence[Path]],
    tokenizer: PreTrainedTokenizerFast,
    train_on: TrainOn,
    options: EncodingOptions,
    cache: TokenCache,
    image_processor: str = "",
) -> str:
    """Return 32 hex digits that depend on contents and order of files, not on their names and locations.

    Args:
        cache: stores checksums of files.
        image_processor: description of the processor that prepares images, or "" if rows have none. Otherwise the
            locations of files count, because image paths are relative to them.
    """
    described = [
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
        "encoding": ENCODING,
        "libraries": {name: version(name) for name in ("transformers", "tokenizers")},
        "tokenizer": _tokenizer_parts(tokenizer),
        "sources": described,
        "only_text": options.kind.only_text,
        "joins_texts": options.joins_texts,
        "options": [train_on, options.max_length, options.overlong, options.bad_rows],
    }
    if options.kind.recorded:
        parts["preferences"] = options.kind.recorded
    if image_processor:
        folders = [[str(file.absolute().parent) for file in paths] for paths in files]
        parts["images"] = [image_processor, folders, version("pillow")]
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _tokenizer_parts(tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    """Return everything that determines a tokenizer's output: vocabulary, rules, special tokens, chat template."""
    rules = tokenizer.backend_tokenizer.to_str().encode()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [hashlib.sha256(rules).hexdigest(), special, tokenizer.chat_template]
