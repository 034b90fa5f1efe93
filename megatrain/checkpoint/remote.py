"""Checkpoints at a URL: upload, commit, verification and download. A checkpoint's document is written last.

    s3://bucket/run/RUN.json                                    the run that owns the URL
    s3://bucket/run/00000003-step-600/CHECKPOINT.json           written last; without it, the copy does not exist
    s3://bucket/run/00000003-step-600/rank00000/OBJECTS.json    size and SHA-256 of each object of a rank
    s3://bucket/run/00000003-step-600/rank00000/snap/...        a whole generation: manifest and zarr arrays
    s3://bucket/run/00000003-step-600/rank00000/run/...         files of the run's folder, sent by rank 0

A single process has no rank folder. ``output_dir/checkpoints`` has the same layout, so ``GenerationReader`` can read a
copy that any tool has downloaded. This module uses only these methods of fsspec's file systems: ``ls``, ``open``,
``pipe_file``, ``cat_file``, ``rm_file``, ``rm`` and ``makedirs``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.copy_thread import CopyCancelledError, Throttle
from megatrain.checkpoint.document import (
    Checkpoint,
    RankGeneration,
    manifest_checksum,
    rank_folder_name,
    read_checkpoints,
    write_document,
)
from megatrain.checkpoint.scan import scan
from megatrain.checkpoint.state import CheckpointError, KeptRules
from tiered import GenerationReader, MiB, WholeCopies, format_size
from tiered.errors import CorruptBlockError, GenerationError, TieredError
from tiered.ext import MANIFEST_NAME, SNAPSHOT_FOLDER, claim_directory, manifest_text, replace_file, top_text

if TYPE_CHECKING:
    import torch

    from megatrain.checkpoint.table import CheckpointSpec

__all__ = [
    "RemoteCheckpoint",
    "RemoteError",
    "RemoteFolder",
    "RemotePart",
    "TakenError",
    "Upload",
    "download_newest",
    "find_run_files",
    "list_at_url",
    "verify_at_url",
]

#: Format of the documents at the URL. Readers refuse newer formats.
REMOTE_FORMAT = 1
RUN_NAME, CHECKPOINT_NAME, OBJECTS_NAME = "RUN.json", "CHECKPOINT.json", "OBJECTS.json"
#: File in ``output_dir`` with the run's identity at the URL.
IDENTITY_NAME = "save_copy.json"
#: Folder in ``output_dir`` with an unfinished download.
PART_NAME = "checkpoints.part"
#: Number of concurrent uploads or downloads. Each needs a piece of 16 MiB plus fsspec's buffers.
NUM_WORKERS = 2
#: Maximum size of an object.
OBJECT_BYTES = 512 * MiB
#: Bytes per part of an upload, and per read.
PART_BYTES = 8 * MiB
#: Number of download attempts before an object counts as damaged.
NUM_TRIES = 3

#: Files in the run's folder that a resumed run needs: reference log-probabilities (no model can recompute them), the
#: log
#: so far, and the ids of tracker runs.
RUN_FILES = ("reference/*", "metrics.jsonl", "trackers.json")
_RUN_FILES_NAME = "run"

_FOLDER = re.compile(r"([0-9]{8})-step-([0-9]+)")
_WITH_FOLDERS = ("file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs", "arrow_hdfs")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING")


class RemoteError(CheckpointError):
    """The URL cannot be reached or written, or its objects cannot be used."""


class DamagedError(RemoteError):
    """An object differs from the object that was uploaded."""


class TakenError(RemoteError):
    """Another run, or another process of this run, uses the URL."""


@dataclass(frozen=True, slots=True)
class RemotePart:
    """One rank's part of a copy.

    Attributes:
        path: Folder of the rank, as in ``RankGeneration.path``.
    """

    path: str
    generation: int
    num_objects: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A whole copy at the URL.

    Attributes:
        number: Number of the copy. It grows with every copy, regardless of the machine that makes the copy.
        parts: Parts by rank.
    """

    number: int
    step: int
    parts: tuple[RemotePart, ...]
    meta: Mapping[str, Any]
    lanes: int
    elements: Mapping[str, int]

    @property
    def name(self) -> str:
        """Name of the copy's folder."""
        return f"{self.number:08d}-step-{self.step}"

    @property
    def order_key(self) -> tuple[int, str]:
        """Sort key by time, as for the checkpoint that was copied."""
        return self.as_checkpoint(Path()).order_key

    @property
    def identity(self) -> tuple[int | None, str]:
        """Step and save time of the checkpoint that was copied."""
        return self.step, str(self.meta.get("saved_at", ""))

    def as_checkpoint(self, folder: Path) -> Checkpoint:
        """Return a description of this copy as a checkpoint in a folder."""
        ranks = tuple(RankGeneration(part.path, part.generation) for part in self.parts)
        return Checkpoint(folder, self.number, ranks, self.meta, self.lanes, dict(self.elements))

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(part.nbytes for part in self.parts)


@dataclass
class Upload:
    """Progress of one upload. A retry can resume it.

    Attributes:
        sums: Size and SHA-256 by the path of an object at the URL.
        compared: Paths of the objects that were read back and matched.
    """

    throttle: Throttle
    sums: dict[str, tuple[int, str]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)


class RemoteFolder:
    """The copies at a URL. The constructor reads nothing. Thread-safe.

    Args:
        url: Any URL that fsspec opens, e.g. ``"s3://bucket/run"``. Credentials come from the environment.

    Raises:
        RemoteError: fsspec's package for the URL is missing, or the URL does not refer to a file system.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        protocol = url.partition("://")[0]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(protocol)
            advice = f"pip install {package}" if package else "Name a URL that fsspec knows, such as s3://bucket/folder"
            if package == "s3fs":
                advice += " (it is in megatrain-tier[remote])"
            text = f"checkpoint.save_copy: '{url}' cannot be opened: {_mask_secrets(str(error)).rstrip('.')}. {advice}"
            raise RemoteError(text) from error
        except Exception as error:
            raise self._error("it cannot be opened", error) from error
        self._root = self._root.rstrip("/")
        self._has_folders = protocol in _WITH_FOLDERS

    # -- ownership -------------------------------------------------------------------------------------------------

    def claim(self, output_dir: Path, *, is_empty: bool) -> None:
        """Claim the URL for a run, and check that it is writable.

        Args:
            output_dir: Folder of the run, where the run's identity is stored.
            is_empty: Whether ``output_dir`` contains no checkpoint. The run that owns the URL can then continue in this
                folder.

        Raises:
            TakenError: Another run owns the URL.
            RemoteError: The URL cannot be read or written.
        """
        path, own = output_dir / IDENTITY_NAME, None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            own = str(json.loads(path.read_bytes())["run"])
        text = self._read(RUN_NAME)
        try:
            there = None if text is None else str(json.loads(text)["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(f"{self._title} has a {RUN_NAME} that cannot be read: use another URL") from error
        run = (is_empty and there) or own or uuid.uuid4().hex
        if there not in (None, run) and self.checkpoints():
            raise TakenError(
                f"{self._title} holds the checkpoints of another run than '{output_dir}'. Name another URL; or, to "
                "continue that run, an empty output_dir"
            )
        document = json.dumps({"format": REMOTE_FORMAT, "run": run})
        # Write the document even if it exists, so that missing permissions are found immediately.
        self._write(RUN_NAME, document.encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, document, durable=True)

    # -- list --------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[RemoteCheckpoint]:
        """Return the whole copies, newest first. Incomplete copies and copies with a damaged document are omitted.

        Raises:
            RemoteError: The URL cannot be read.
        """
        found = (self._checkpoint(name) for name in sorted(self._folders(), reverse=True))
        return [each for each in found if each is not None]

    def _folders(self) -> list[str]:
        with self._errors_explained("it cannot be listed"):
            try:
                names = self._files.ls(self._root, detail=False)
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):
                    raise
                return []
        plain = (str(name).rstrip("/").rpartition("/")[2] for name in names)
        return [name for name in plain if _FOLDER.fullmatch(name)]

    def _checkpoint(self, name: str) -> RemoteCheckpoint | None:
        text = self._read(f"{name}/{CHECKPOINT_NAME}")
        if text is None:
            return None
        try:
            document = json.loads(text)
            version, body = document["format"], document["body"]
            if version > REMOTE_FORMAT:
                raise RemoteError(f"'{self.url}/{name}' is of a newer version of this program: upgrade")
            if _body_sha256(body) != document["sha256"]:
                return None
            parts = tuple(map(_parse_part, body["parts"]))
            step, number = int(_FOLDER.fullmatch(name)[2]), int(name[:8])  # type: ignore[index]
            paths = [part.path for part in parts]
            if not paths or paths not in ([""], [rank_folder_name(rank) for rank in range(len(parts))]):
                return None  # the document may be untrusted, so no folder name may lead out of the copy
            meta, lanes, elements = body["meta"], body["lanes"], body["elements"]
            if not isinstance(meta, dict) or not all(map(_is_count, [lanes, *elements.values()])):
                return None
            return RemoteCheckpoint(number, step, parts, meta, lanes, elements)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    # -- make a copy -----------------------------------------------------------------------------------------------

    def send(
        self, reader: GenerationReader, name: str, path: str, upload: Upload, files: Mapping[str, Path] | None = None
    ) -> RemotePart:
        """Send a generation, read it back and compare it. A repeated call resumes an interrupted call.

        Every byte is compared twice: with its checksum when it is read from the drive, and with its SHA-256 after all
        objects were uploaded. The upload needs about 110 MiB of memory, including s3fs's buffers.

        Args:
            name: Folder of the copy at the URL.
            files: Files in the run's folder to send with the generation, by name.

        Raises:
            CorruptBlockError: A byte of the generation differs from the byte that was written.
            GenerationError: A part of the generation is missing.
            TransferError: A drive returned an error.
            RemoteError: The URL returned an error.
            CopyCancelledError: The upload was cancelled.
        """
        prefix = f"{name}/{path}/" if path else f"{name}/"
        objects = dict(_objects(reader, upload))
        for each, file in (files or {}).items():
            objects[f"{_RUN_FILES_NAME}/{each}"] = partial(_yield_file, file)
        self._in_parallel(partial(self._send, upload), [(prefix + each, read) for each, read in objects.items()])
        self._in_parallel(partial(self._compare, upload), [prefix + each for each in objects])
        sums = {each: upload.sums[prefix + each] for each in sorted(objects)}
        text = json.dumps({"format": REMOTE_FORMAT, "objects": sums}, sort_keys=True).encode()
        self._write(prefix + OBJECTS_NAME, text)
        nbytes = sum(size for size, _ in sums.values())
        return RemotePart(path, reader.generation, len(sums), nbytes, hashlib.sha256(text).hexdigest())

    def _send(self, upload: Upload, item: tuple[str, _Contents]) -> None:
        name, contents = item
        if name in upload.sums:
            return
        upload.throttle.check()
        digest, nbytes = hashlib.sha256(), 0

        def read() -> Iterator[memoryview | bytes]:
            nonlocal nbytes
            for part in contents():
                upload.throttle.check()
                digest.update(part)
                nbytes += len(part)
                yield part

        self._write(name, read())
        upload.sums[name] = (nbytes, digest.hexdigest())

    def _compare(self, upload: Upload, name: str) -> None:
        if name in upload.compared:
            return
        nbytes, expected = upload.sums[name]
        digest = hashlib.sha256()
        for part in self._parts(name, nbytes):
            upload.throttle.check()
            digest.update(part)
        if digest.hexdigest() != expected:
            del upload.sums[name]  # without this entry, the next try sends the object again
            raise DamagedError(f"{self._title}: '{name}' was altered: SHA-256 {digest.hexdigest()}")
        upload.compared.add(name)

    def commit(self, made: RemoteCheckpoint) -> None:
        """Complete a copy by writing its document, after all objects.

        Raises:
            TakenError: Another process has made a copy in the meantime.
            RemoteError: The document cannot be written.
        """
        others = [each for each in self.checkpoints() if each.number >= made.number]
        if [(each.number, each.parts) for each in others] == [(made.number, made.parts)]:
            return  # an earlier try wrote the document, but the response was lost
        if others:
            raise TakenError(
                f"{self._title} received copy {others[0].number} from another process meanwhile: two runs share it. "
                "End one of them, or name another URL in checkpoint.save_copy"
            )
        body = {
            "parts": [asdict(part) for part in made.parts],
            "meta": dict(made.meta),
            "lanes": made.lanes,
            "elements": dict(made.elements),
        }
        document = {"format": REMOTE_FORMAT, "sha256": _body_sha256(body), "body": body}
        self._write(f"{made.name}/{CHECKPOINT_NAME}", json.dumps(document, sort_keys=True).encode())
        if self._checkpoint(made.name) is None:
            raise DamagedError(f"{self._title}: '{made.name}/{CHECKPOINT_NAME}' differs from the sent one")

    def prune(self, keep: int, best_step: int | None) -> None:
        """Remove older and incomplete copies. Keep the newest ``keep`` copies and the copy of ``best_step``.

        Only folders older than the newest copy are removed. Raises ``RemoteError``. A repeated call resumes the
        removal.
        """
        whole = self.checkpoints()
        stay = [each.name for each in [each for each in whole if each.step != best_step][:keep]]
        stay += [each.name for each in whole if each.step == best_step][:1]
        for name in sorted(self._folders()):
            if name not in stay and whole and int(name[:8]) < whole[0].number:
                with self._errors_explained(f"'{name}' cannot be removed"):
                    # Remove the document first, so that readers ignore a partially removed copy.
                    with contextlib.suppress(FileNotFoundError):
                        self._files.rm_file(f"{self._root}/{name}/{CHECKPOINT_NAME}")
                    with contextlib.suppress(FileNotFoundError):
                        self._files.rm(f"{self._root}/{name}", recursive=True)

    def problems(self, checkpoint: RemoteCheckpoint) -> Iterator[str]:
        """Read all objects of a copy. Yield a sentence about each object that is missing or differs."""
        for part in checkpoint.parts:
            try:
                objects = self._list_objects(checkpoint, part)
            except DamagedError as error:
                yield str(error)
                continue
            for name, (nbytes, expected) in objects.items():
                where = "/".join(filter(None, (checkpoint.name, part.path, name)))
                digest = hashlib.sha256()
                try:
                    for data in self._parts(where, nbytes):
                        digest.update(data)
                except DamagedError as error:
                    yield str(error)
                    continue
                if digest.hexdigest() != expected:
                    yield f"'{self.url}/{where}': its SHA-256 is {digest.hexdigest()}, but was {expected}"

    # -- download ----------------------------------------------------------------------------------------------------

    def fetch(self, checkpoint: RemoteCheckpoint, output_dir: Path, min_free_bytes: int) -> None:
        """Download a copy as a checkpoint of the run in ``output_dir``, as if it had been saved there.

        A repeated call resumes an interrupted download. Files that are already on the drive are compared, not fetched
        again.

        Args:
            output_dir: Folder of the run. No process may train in this folder.
            min_free_bytes: Bytes to leave free on the drive.

        Raises:
            DamagedError: An object is missing or differs from the object that was uploaded.
            RemoteError: The URL cannot be read, or the drive is too full.
        """
        part_dir = output_dir / PART_NAME
        root = part_dir / checkpoint.name
        objects = [
            (part.path, name, nbytes, sum_)
            for part in checkpoint.parts
            for name, (nbytes, sum_) in self._list_objects(checkpoint, part).items()
        ]
        try:
            for other in part_dir.iterdir() if part_dir.is_dir() else ():
                if other != root:
                    shutil.rmtree(other)
            root.mkdir(parents=True, exist_ok=True)
            there = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
            need, free = checkpoint.nbytes - there + min_free_bytes, shutil.disk_usage(root).free
            if free < need:
                raise RemoteError(
                    f"the drive of '{output_dir}' has {format_size(free)} free, and the checkpoint of step "
                    f"{checkpoint.step} in '{self.url}' takes {format_size(checkpoint.nbytes)} in addition to "
                    f"checkpoint.min_free_disk. Free {format_size(need - free)}"
                )
            self._in_parallel(partial(self._fetch, checkpoint.name, root), objects)
            _restore_run_files(root / checkpoint.parts[0].path / _RUN_FILES_NAME, output_dir)
            self._import_generations(checkpoint, root, output_dir / CHECKPOINTS_NAME)
            shutil.rmtree(part_dir)
        except (CorruptBlockError, GenerationError) as error:
            raise DamagedError(f"'{self.url}/{checkpoint.name}': {error}") from error
        except (OSError, TieredError) as error:
            raise RemoteError(f"'{self.url}/{checkpoint.name}' cannot be downloaded: {error}") from error

    def _list_objects(self, checkpoint: RemoteCheckpoint, part: RemotePart) -> dict[str, tuple[int, str]]:
        """Return the objects of a rank's part: size and SHA-256 by name."""
        path = "/".join(filter(None, (checkpoint.name, part.path, OBJECTS_NAME)))
        text = self._read(path)
        if text is None or hashlib.sha256(text).hexdigest() != part.sha256:
            raise DamagedError(f"'{self.url}/{path}' is {'missing' if text is None else 'damaged'}")
        found: dict[str, tuple[int, str]] = {}
        try:
            for name, (nbytes, sum_) in json.loads(text)["objects"].items():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
                    raise DamagedError(f"'{self.url}/{path}' names {name!r}, which would lie outside of the checkpoint")
                if not _is_count(nbytes) or not isinstance(sum_, str):
                    raise TypeError(f"{name!r} has the size {nbytes!r:.40} and the checksum {sum_!r:.80}")
                found[name] = (nbytes, sum_)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"'{self.url}/{path}' is invalid: {type(error).__name__}: {error}") from error
        return found

    def _fetch(self, folder: str, root: Path, item: tuple[str, str, int, str]) -> None:
        path, name, nbytes, expected = item
        target = root / path / name
        if target.is_file() and target.stat().st_size == nbytes and _sha256_of(target) == expected:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".part")
        where, problem = "/".join(filter(None, (folder, path, name))), ""
        for _ in range(NUM_TRIES):
            digest = hashlib.sha256()
            with temporary.open("wb") as file:
                for part in self._parts(where, nbytes):
                    digest.update(part)
                    file.write(part)
            if digest.hexdigest() == expected:
                os.replace(temporary, target)
                return
            problem = f"its SHA-256 is {digest.hexdigest()}, but was {expected} when it was written"
        raise DamagedError(f"'{self.url}/{where}' is damaged: {problem}")

    def _import_generations(self, checkpoint: RemoteCheckpoint, root: Path, folder: Path) -> None:
        """Verify downloaded generations, and hard-link their files into the run's stores."""
        known = read_checkpoints(folder, on_damage=lambda error: None)
        is_listed = checkpoint.parts[0].path != ""
        if is_listed:
            claim_directory(folder)
        ranks = []
        for part in checkpoint.parts:
            copies = WholeCopies(folder / part.path)
            try:
                figures = copies.copy(GenerationReader(root / part.path, part.generation))
            finally:
                copies.close()
            seal = manifest_checksum(folder / part.path, figures.generation) if is_listed else ""
            ranks.append(RankGeneration(part.path, figures.generation, seal))
        if is_listed:
            number = 1 + max((each.number for each in known), default=0)
            made = Checkpoint(
                folder, number, tuple(ranks), checkpoint.meta, checkpoint.lanes, dict(checkpoint.elements)
            )
            write_document(folder, [*(each for each in known if each.is_listed), made])

    # -- objects ---------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> bytes | None:
        """Return a small object, or None if it does not exist."""
        with self._errors_explained(f"'{name}' cannot be read"):
            try:
                return bytes(self._files.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return None

    def _parts(self, name: str, nbytes: int) -> Iterator[bytes]:
        """Yield an object, part by part."""
        for start in range(0, nbytes, PART_BYTES):
            with self._errors_explained(f"'{name}' cannot be read"):
                try:
                    yield self._files.cat_file(f"{self._root}/{name}", start=start, end=min(start + PART_BYTES, nbytes))
                except FileNotFoundError as error:
                    raise DamagedError(f"'{self.url}/{name}' is missing") from error

    def _write(self, name: str, contents: bytes | Iterable[memoryview | bytes]) -> None:
        """Write an object. An interrupted write leaves no object or an incomplete object."""
        path = f"{self._root}/{name}"
        with self._errors_explained(f"'{name}' cannot be written"):
            if self._has_folders:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(contents, bytes):
                self._files.pipe_file(path, contents)
                return
            file = self._files.open(path, "wb", block_size=PART_BYTES)
            try:
                for part in contents:
                    file.write(part)
            except BaseException:
                # Closing the file would turn the partial upload into an object.
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(Exception):
                    file.closed = True
                raise
            file.close()

    def _in_parallel(self, act: Callable[[Any], None], items: Sequence[Any]) -> None:
        with ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="checkpoint-objects") as workers:
            futures = [workers.submit(act, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    @property
    def _title(self) -> str:
        return f"checkpoint.save_copy: '{self.url}'"

    @contextlib.contextmanager
    def _errors_explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RemoteError, TieredError, CopyCancelledError):
            raise
        except Exception as error:  # fsspec file systems and their clients raise errors of any type
            raise self._error(what, error) from error

    def _error(self, what: str, error: Exception) -> RemoteError:
        text = _mask_secrets(str(error) or type(error).__name__).rstrip(".")
        names = [each.__name__ for each in type(error).__mro__]
        is_anonymous = "NoCredentialsError" in names or "locate credentials" in text
        if is_anonymous or "PartialCredentialsError" in names or "DefaultCredentialsError" in names:
            text += (
                ". No credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (s3); "
                "GOOGLE_APPLICATION_CREDENTIALS (gs)"
            )
        elif isinstance(error, PermissionError):
            text += ". These credentials lack permission: they need the right to list, read, write and delete there"
        elif isinstance(error, FileNotFoundError):
            text += ". Is the name of the bucket right? The bucket must exist"
        return RemoteError(f"{self._title}: {what}: {text}")


# -- the objects of a generation -------------------------------------------------------------------------------------

#: Function that yields the bytes of an object.
_Contents = Callable[[], Iterator["memoryview | bytes"]]


def _objects(reader: GenerationReader, upload: Upload) -> Iterator[tuple[str, _Contents]]:
    """Yield the name and contents of each object in a directory with one whole generation.

    All blocks are next to the manifest, in files of at most 512 MiB.
    """
    folder = f"{SNAPSHOT_FOLDER}/{reader.generation:08d}"
    blocks = tuple(replace(record, location=f"{folder}/{record.key}") for record in reader.manifest.blocks)
    text = manifest_text(replace(reader.manifest, blocks=blocks, paths={}))
    yield MANIFEST_NAME, partial(iter, (top_text(reader.generation).encode(),))
    yield f"{folder}/{MANIFEST_NAME}", partial(iter, (text.encode(),))
    for record in reader.manifest.blocks:
        chunk_bytes = _chunk_bytes(record.nbytes)
        document = json.loads((reader.place(record.key) / "zarr.json").read_bytes())
        itemsize = reader.spec(record.key).dtype.itemsize
        document["chunk_grid"]["configuration"]["chunk_shape"] = [chunk_bytes // itemsize]
        yield f"{folder}/{record.key}/zarr.json", partial(iter, (json.dumps(document).encode(),))
        for number, start in enumerate(range(0, record.nbytes, chunk_bytes)):
            contents = partial(_yield_chunk, reader, record.key, start, chunk_bytes, upload)
            yield f"{folder}/{record.key}/c/{number}", contents


def _yield_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part


def find_run_files(output_dir: Path) -> dict[str, Path]:
    """Return the files in a run's folder that are sent with each checkpoint, by relative name."""
    found = (path for pattern in RUN_FILES for path in sorted(output_dir.glob(pattern)))
    return {path.relative_to(output_dir).as_posix(): path for path in found if path.is_file()}


def _parse_part(values: Mapping[str, Any]) -> RemotePart:
    """Return a rank's part of a copy. Raises ``TypeError`` or ``ValueError`` for invalid values."""
    part = RemotePart(**values)
    texts, counts = (part.path, part.sha256), (part.generation, part.num_objects, part.nbytes)
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_count, counts)):
        raise TypeError(f"a part of a copy has {texts} and {counts}")
    return part


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _restore_run_files(folder: Path, output_dir: Path) -> None:
    """Move files into a run's folder, except files that the folder already contains."""
    for name, file in find_run_files(folder).items():  # ignore other files, because the URL may be untrusted
        target = output_dir / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)


def _yield_chunk(
    reader: GenerationReader, key: str, start: int, chunk_bytes: int, upload: Upload
) -> Iterator[memoryview | bytes]:
    """Yield a verified, zero-padded chunk of a block's array. Pause after each read for as long as the read took."""
    import torch

    files, nbytes = reader.files(key), reader.spec(key).nbytes
    stop = min(start + chunk_bytes, nbytes)
    buffer: torch.Tensor = torch.empty(min(reader.piece_bytes, stop - start), dtype=torch.uint8)
    for first in range(start, stop, reader.piece_bytes):
        piece = buffer[: min(reader.piece_bytes, stop - first)]
        start_s = time.perf_counter()
        reader.read_piece(key, files, (first, first + len(piece)), piece)
        upload.throttle.rest(start_s)
        for at in range(0, len(piece), PART_BYTES):
            yield memoryview(piece[at : at + PART_BYTES].numpy().data)
    yield bytes(start + chunk_bytes - stop)


def _chunk_bytes(nbytes: int) -> int:
    """Return the chunk size of an array. All its chunks have this size. No piece of 16 MiB spans two chunks."""
    num_chunks = max(1, -(-nbytes // OBJECT_BYTES))
    unit = GenerationReader.piece_bytes if num_chunks > 1 else 4096
    return max(1, -(-nbytes // (num_chunks * unit))) * unit


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mask_secrets(text: str) -> str:
    """Return an error's text with possible secrets masked."""
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    text = re.sub(r"(\w+://)[^\s'\"]*:[^\s'\"]*@", r"\1***@", text)
    return re.sub(r"([?&][\w.-]*(?:sig|token|secret|credential|key)[\w.-]*=)[^&\s'\"]+", r"\1***", text, flags=re.I)


# -- resume from a URL -----------------------------------------------------------------------------------------------


def rules_at_url(url: str) -> KeptRules | None:
    """Return the settings of the newest copy, or None if there is no copy. Raises ``RemoteError``."""
    found = (KeptRules.of_meta(each.meta) for each in RemoteFolder(url).checkpoints())
    return next((rules for rules in found if rules is not None), None)


def list_at_url(url: str) -> list[Checkpoint]:
    """Return the copies at a URL as checkpoints, oldest first. Raises ``RemoteError``."""
    found = RemoteFolder(url).checkpoints()
    return [_as_listed(each, is_newest=each is found[0]) for each in reversed(found)]


def verify_at_url(url: str, step: int | None = None) -> Iterator[tuple[Checkpoint, list[str]]]:
    """Read every object of the copies at a URL. Yield each copy with its problems, oldest first.

    Raises:
        RemoteError: The URL cannot be read, or has no copy of this step.
    """
    folder = RemoteFolder(url)
    there = folder.checkpoints()
    found = [each for each in reversed(there) if step is None or each.step == step]
    if not found:
        steps = ", ".join(str(each.step) for each in reversed(there)) or "none"
        raise RemoteError(f"'{url}' holds no copy of this step. Its steps: {steps}")
    for each in found:
        yield _as_listed(each, is_newest=each is there[0]), list(folder.problems(each))


def _as_listed(copy: RemoteCheckpoint, *, is_newest: bool) -> Checkpoint:
    return replace(copy.as_checkpoint(Path(COPIES_NAME)), nbytes=copy.nbytes, is_newest=is_newest)


def download_newest(
    spec: CheckpointSpec,
    on_message: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> None:
    """Download the newest copy and the copy of the best evaluation, if the newest copy is newer than local checkpoints.

    Args:
        spec: Local folders of the run's checkpoints, and the URL.
        check: Called with the newest copy before the download. It must raise an error if the run cannot resume from it.

    Raises:
        RemoteError: The URL cannot be used, belongs to another run, or has no whole copy.
    """
    url = spec.table.copy_url
    assert url is not None
    folder, own = RemoteFolder(url), _local_checkpoints(spec)
    usable = [each for each in own if each.problem is None]
    folder.claim(spec.output_dir, is_empty=not own)
    newest = max((each.order_key for each in usable), default=(0, ""))
    whole = folder.checkpoints()
    newer = [each for each in whole if each.order_key > newest]
    if not newer:
        shutil.rmtree(spec.output_dir / PART_NAME, ignore_errors=True)  # left by an interrupted download
        return
    if spec.table.resume_from_checkpoint == "no":
        raise RemoteError(
            f"checkpoint.save_copy: '{url}' holds a run that was saved at step {newer[0].step}, and "
            'checkpoint.resume_from_checkpoint is "no". Write "auto" to continue it, or name another URL'
        )
    check(newer[0].as_checkpoint(spec.output_dir / CHECKPOINTS_NAME))
    problems: list[str] = []
    for each in newer:
        try:
            best = _best_of(each, whole) if spec.table.load_best_model_at_end else None
            for wanted in (best, each):
                if wanted is not None and wanted.identity not in [each.identity for each in usable]:
                    size = format_size(wanted.nbytes)
                    on_message(f"downloading the checkpoint of step {wanted.step} from '{url}', {size}")
                    folder.fetch(wanted, spec.output_dir, spec.table.min_free_disk)
            return
        except DamagedError as error:
            problems.append(str(error))
            on_message(f"the copy of step {each.step} is skipped: {error}")
    if not usable:
        raise RemoteError(
            f"none of the {len(newer)} copies in '{url}' is whole; the newest: {problems[0]}. Name another URL to "
            "start from scratch"
        )


def _local_checkpoints(spec: CheckpointSpec) -> list[Checkpoint]:
    """Return the checkpoints and copies in the run's folder, including unusable ones."""
    folders = [spec.output_dir / name for name in (CHECKPOINTS_NAME, COPIES_NAME)]
    return [each for folder in folders for each in scan(folder, spec.drives, on_damage=lambda error: None)]


def _best_of(newest: RemoteCheckpoint, whole: Sequence[RemoteCheckpoint]) -> RemoteCheckpoint | None:
    best = newest.meta.get("best")
    step = best.get("step") if isinstance(best, Mapping) else None
    return next((each for each in whole if each.step == step and each.number < newest.number), None)
