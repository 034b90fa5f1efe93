"""Uploads and downloads of complete generations. An upload sends several objects, reads them back and compares them.

A downloaded copy becomes a checkpoint of the run, as if the run itself had saved it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatrain.base.names import CHECKPOINTS_NAME
from megatrain.checkpoint.copy_thread import Throttle
from megatrain.checkpoint.document import RankGeneration
from megatrain.checkpoint.listing import ignore_damage, manifest_checksum, read_checkpoints, write_document
from megatrain.checkpoint.object_folder import PART_BYTES, DamagedError, RemoteError
from megatrain.checkpoint.remote_folder import RemoteCheckpoint, RemoteFolder, RemotePart
from tiered import GenerationReader, MiB, WholeCopies, format_size
from tiered.errors import CorruptBlockError, GenerationError, TieredError
from tiered.ext import MANIFEST_NAME, SNAPSHOT_FOLDER, claim_directory, manifest_text, top_text

__all__ = ["PART_NAME", "Upload", "fetch", "find_run_files"]

#: Maximum size of an object.
OBJECT_BYTES = 512 * MiB
#: Files in the run's folder that a resumed run needs: reference log-probabilities (which the trained model cannot
#: recompute), the log so far, and the ids of tracker runs.
RUN_FILES = ("reference/*", "metrics.jsonl", "trackers.json")
RUN_FILES_NAME = "run"
#: Folder in ``output_dir`` with an unfinished download.
PART_NAME = "checkpoints.part"
#: Number of download attempts before an object counts as damaged.
NUM_TRIES = 3

#: Function that yields the bytes of an object.
_Contents = Callable[[], Iterator["memoryview | bytes"]]


class Upload:
    """The upload of one copy. After an error, calling ``send`` again sends only the missing objects."""

    def __init__(self, folder: RemoteFolder, throttle: Throttle) -> None:
        self.throttle, self._folder, self._objects = throttle, folder, folder.objects
        self._digests: dict[str, tuple[int, str]] = {}  # size and SHA-256 of each sent object, by path
        self._verified_names: set[str] = set()  # paths of the objects that were read back and matched

    def send(self, reader: GenerationReader, name: str, path: str, files: Mapping[str, Path]) -> RemotePart:
        """Send a generation, read it back and compare it. Repeat the call to resume an interrupted upload.

        Every byte is verified twice: against the block's checksums when it is read from the drive, and against the
        object's SHA-256 after the upload of all objects. An upload needs about 110 MiB of memory, with s3fs's buffers.

        Args:
            name: Folder of the copy at the URL.
            files: Files in the run's folder to send with the generation, by name.

        Raises:
            CorruptBlockError: A block of the generation does not match its checksums.
            GenerationError: A part of the generation is missing.
            TransferError: A drive returned an error.
            RemoteError: The URL returned an error.
            CopyCancelledError: The upload was cancelled.
        """
        prefix = f"{name}/{path}/" if path else f"{name}/"
        objects = dict(_yield_objects(reader, self.throttle))
        for object_name, file in files.items():
            objects[f"{RUN_FILES_NAME}/{object_name}"] = partial(_yield_file, file)
        self._objects.run_parallel(self._send, [(prefix + object_name, read) for object_name, read in objects.items()])
        self._objects.run_parallel(self._compare, [prefix + object_name for object_name in objects])
        sums = {object_name: self._digests[prefix + object_name] for object_name in sorted(objects)}
        return self._folder.seal_part(name, path, reader.generation, sums)

    def _send(self, item: tuple[str, _Contents]) -> None:
        name, contents = item
        if name in self._digests:
            return
        self.throttle.check()
        digest, nbytes = hashlib.sha256(), 0

        def read() -> Iterator[memoryview | bytes]:
            nonlocal nbytes
            for part in contents():
                self.throttle.check()
                digest.update(part)
                nbytes += len(part)
                yield part

        self._objects.write(name, read())
        self._digests[name] = (nbytes, digest.hexdigest())

    def _compare(self, name: str) -> None:
        if name in self._verified_names:
            return
        nbytes, expected = self._digests[name]
        digest = self._objects.sha256(name, nbytes, lambda part: self.throttle.check())
        if digest != expected:
            del self._digests[name]  # without this entry, the next try sends the object again
            raise DamagedError(f"{self._objects.title}: '{name}' was altered: SHA-256 {digest}")
        self._verified_names.add(name)


def _yield_objects(reader: GenerationReader, throttle: Throttle) -> Iterator[tuple[str, _Contents]]:
    """Yield the name and contents of each object of a store directory that contains only this generation.

    Blocks can be on several drives, but the copy stores all of them next to the manifest, in files of at most 512 MiB.
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
        for index, start in enumerate(range(0, record.nbytes, chunk_bytes)):
            contents = partial(_yield_chunk, reader, record.key, start, chunk_bytes, throttle)
            yield f"{folder}/{record.key}/c/{index}", contents


def _yield_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part


def _yield_chunk(
    reader: GenerationReader, key: str, start: int, chunk_bytes: int, throttle: Throttle
) -> Iterator[memoryview | bytes]:
    """Yield a verified, zero-padded chunk of a block's array. Pause after each read for as long as the read took."""
    files, nbytes = reader.files(key), reader.spec(key).nbytes
    stop = min(start + chunk_bytes, nbytes)
    buffer = torch.empty(min(reader.piece_bytes, stop - start), dtype=torch.uint8)
    for begin in range(start, stop, reader.piece_bytes):
        piece = buffer[: min(reader.piece_bytes, stop - begin)]
        start_s = time.perf_counter()
        reader.read_piece(key, files, (begin, begin + len(piece)), piece)
        throttle.pause(start_s)
        for offset in range(0, len(piece), PART_BYTES):
            yield memoryview(piece[offset : offset + PART_BYTES].numpy().data)
    yield bytes(start + chunk_bytes - stop)


def _chunk_bytes(nbytes: int) -> int:
    """Return the chunk size of an array in bytes. No 16 MiB piece that the reader reads spans two chunks."""
    num_chunks = max(1, -(-nbytes // OBJECT_BYTES))
    unit = GenerationReader.piece_bytes if num_chunks > 1 else 4096
    return max(1, -(-nbytes // (num_chunks * unit))) * unit


def fetch(folder: RemoteFolder, checkpoint: RemoteCheckpoint, output_dir: Path, min_free_bytes: int) -> None:
    """Download a copy as a checkpoint of the run in ``output_dir``, as if it had been saved there.

    Repeat the call to resume an interrupted download. Files that are already on the drive are verified instead of
    downloaded again.

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
        (part.path, name, nbytes, digest)
        for part in checkpoint.parts
        for name, (nbytes, digest) in folder.list_objects(checkpoint, part).items()
    ]
    try:
        for folder_entry in part_dir.iterdir() if part_dir.is_dir() else ():
            if folder_entry != root:
                shutil.rmtree(folder_entry)
        root.mkdir(parents=True, exist_ok=True)
        present_bytes = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        need_bytes, free_bytes = checkpoint.nbytes - present_bytes + min_free_bytes, shutil.disk_usage(root).free
        if free_bytes < need_bytes:
            raise RemoteError(
                f"the drive of '{output_dir}' has {format_size(free_bytes)} free, and the checkpoint of step "
                f"{checkpoint.step} in '{folder.url}' takes {format_size(checkpoint.nbytes)} in addition to "
                f"checkpoint.min_free_disk. Free {format_size(need_bytes - free_bytes)}"
            )
        folder.objects.run_parallel(partial(_fetch_object, folder, checkpoint.name, root), objects)
        _restore_run_files(root / checkpoint.parts[0].path / RUN_FILES_NAME, output_dir)
        _import_generations(checkpoint, root, output_dir / CHECKPOINTS_NAME)
        shutil.rmtree(part_dir)
    except (CorruptBlockError, GenerationError) as error:
        raise DamagedError(f"'{folder.url}/{checkpoint.name}': {error}") from error
    except (OSError, TieredError) as error:
        raise RemoteError(f"'{folder.url}/{checkpoint.name}' cannot be downloaded: {error}") from error


def _fetch_object(folder: RemoteFolder, copy: str, root: Path, item: tuple[str, str, int, str]) -> None:
    path, name, nbytes, expected = item
    target = root / path / name
    if target.is_file() and target.stat().st_size == nbytes and _sha256_of(target) == expected:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary_path = target.with_name(target.name + ".part")
    full_name, problem = "/".join(filter(None, (copy, path, name))), ""
    for _ in range(NUM_TRIES):
        with temporary_path.open("wb") as file:
            digest = folder.objects.sha256(full_name, nbytes, file.write)
        if digest == expected:
            os.replace(temporary_path, target)
            return
        problem = f"its SHA-256 is {digest}, but was {expected} when it was written"
    raise DamagedError(f"'{folder.url}/{full_name}' is damaged: {problem}")


def _import_generations(checkpoint: RemoteCheckpoint, root: Path, folder: Path) -> None:
    """Verify downloaded generations, and hard-link their files into the run's stores."""
    old_checkpoints = read_checkpoints(folder, ignore_damage)
    is_listed = checkpoint.parts[0].path != ""
    if is_listed:
        claim_directory(folder)
    generations = []
    for part in checkpoint.parts:
        copies = WholeCopies(folder / part.path)
        try:
            figures = copies.copy(GenerationReader(root / part.path, part.generation))
        finally:
            copies.close()
        digest = manifest_checksum(folder / part.path, figures.generation) if is_listed else ""
        generations.append(RankGeneration(part.path, figures.generation, digest))
    if is_listed:
        number = 1 + max((c.number for c in old_checkpoints), default=0)
        new_checkpoint = checkpoint.checkpoint.relocated(folder, number, generations)
        write_document(folder, [*(c for c in old_checkpoints if c.is_listed), new_checkpoint])


def _restore_run_files(folder: Path, output_dir: Path) -> None:
    """Move downloaded run files into the run's folder, without replacing existing files."""
    for name, file in find_run_files(folder).items():  # ignore other files, because the URL may be untrusted
        target = output_dir / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_run_files(output_dir: Path) -> dict[str, Path]:
    """Return the files in a run's folder that are sent with each checkpoint, by path relative to the folder."""
    paths = (path for pattern in RUN_FILES for path in sorted(output_dir.glob(pattern)))
    return {path.relative_to(output_dir).as_posix(): path for path in paths if path.is_file()}
