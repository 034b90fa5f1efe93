"""Copies of checkpoints at a URL: the folder of all copies, and its documents. A copy's document is written last.

    s3://bucket/run/RUN.json                                    the run that owns the URL
    s3://bucket/run/00000003-step-600/CHECKPOINT.json           written last; without it, the copy does not exist
    s3://bucket/run/00000003-step-600/rank00000/OBJECTS.json    size and SHA-256 of each object of a rank
    s3://bucket/run/00000003-step-600/rank00000/snap/...        a complete generation: manifest and zarr arrays
    s3://bucket/run/00000003-step-600/rank00000/run/...         files of the run's folder, sent by rank 0

A single process has no rank folder. ``output_dir/checkpoints`` has the same layout, so ``GenerationReader`` can read a
copy that any tool has downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatrain.base.names import COPIES_NAME
from megatrain.checkpoint.document import Checkpoint, RankGeneration
from megatrain.checkpoint.inspection import InventoryEntry
from megatrain.checkpoint.inventory import OnBlock, Verified
from megatrain.checkpoint.object_folder import DamagedError, ObjectFolder, RemoteError
from megatrain.checkpoint.state import DecidedSettings
from megatrain.ranks.world import rank_folder_name
from tiered.ext import replace_file

__all__ = [
    "RemoteCheckpoint",
    "RemoteFolder",
    "RemotePart",
    "UrlInUseError",
    "UrlInventory",
    "settings_at_url",
]

#: Format of the documents at the URL. Readers refuse newer formats.
REMOTE_FORMAT = 1
RUN_NAME, CHECKPOINT_NAME, OBJECTS_NAME = "RUN.json", "CHECKPOINT.json", "OBJECTS.json"
#: File in ``output_dir`` with the run's identity at the URL.
IDENTITY_NAME = "save_copy.json"

_FOLDER = re.compile(r"([0-9]{8})-step-([0-9]+)")


class UrlInUseError(RemoteError):
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
    """A complete copy of a checkpoint at the URL.

    Attributes:
        number: Number of the copy. It grows with every copy, regardless of which machine makes it.
        parts: Parts by rank.
        checkpoint: The checkpoint that was copied.
    """

    number: int
    step: int
    parts: tuple[RemotePart, ...]
    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        """Name of the copy's folder."""
        return f"{self.number:08d}-step-{self.step}"

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(part.nbytes for part in self.parts)


class RemoteFolder:
    """The copies at a URL (see ``ObjectFolder``). The constructor reads nothing. Thread-safe."""

    def __init__(self, url: str) -> None:
        self.objects = ObjectFolder(url)
        self.url = self.objects.url

    def claim(self, output_dir: Path, *, is_empty: bool) -> None:
        """Claim the URL for a run, and check that it is writable.

        Args:
            output_dir: Folder of the run, where the run's identity is stored.
            is_empty: Whether ``output_dir`` contains no checkpoint. If so, the run that owns the URL may continue here.

        Raises:
            UrlInUseError: Another run owns the URL.
            RemoteError: The URL cannot be read or written.
        """
        path, local_id = output_dir / IDENTITY_NAME, None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            local_id = str(json.loads(path.read_bytes())["run"])
        text = self.objects.read(RUN_NAME)
        try:
            remote_id = None if text is None else str(json.loads(text)["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(f"{self.objects.title} has a {RUN_NAME} that cannot be read: use another URL") from error
        run = (is_empty and remote_id) or local_id or uuid.uuid4().hex
        if remote_id not in (None, run) and self.checkpoints():
            raise UrlInUseError(
                f"{self.objects.title} holds the checkpoints of another run than '{output_dir}'. Name another URL; or, "
                "to continue that run, an empty output_dir"
            )
        document = json.dumps({"format": REMOTE_FORMAT, "run": run})
        # Write the document even if it exists, so that missing permissions are found immediately.
        self.objects.write(RUN_NAME, document.encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, document, durable=True)

    def checkpoints(self) -> list[RemoteCheckpoint]:
        """Return the complete copies, newest first. Copies that are incomplete or have a damaged document are omitted.

        Raises:
            RemoteError: The URL cannot be read.
        """
        copies = (self._checkpoint(name) for name in sorted(self._folders(), reverse=True))
        return [copy for copy in copies if copy is not None]

    def _folders(self) -> list[str]:
        return [name for name in self.objects.list_folders() if _FOLDER.fullmatch(name)]

    def _checkpoint(self, name: str) -> RemoteCheckpoint | None:
        text = self.objects.read(f"{name}/{CHECKPOINT_NAME}")
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
            ranks = tuple(RankGeneration(part.path, part.generation) for part in parts)
            # The folder's name marks the checkpoint as a copy.
            checkpoint = Checkpoint(Path(COPIES_NAME), number, ranks, meta, lanes, elements)
            return RemoteCheckpoint(number, step, parts, checkpoint)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def seal_part(self, name: str, path: str, generation: int, sums: Mapping[str, tuple[int, str]]) -> RemotePart:
        """Complete a rank's part of a copy by writing the list of its objects. Call this after all objects were sent.

        Args:
            name: Folder of the copy at the URL.
            sums: Size and SHA-256 of each object by name.
        """
        text = json.dumps({"format": REMOTE_FORMAT, "objects": sums}, sort_keys=True).encode()
        self.objects.write("/".join(filter(None, (name, path, OBJECTS_NAME))), text)
        nbytes = sum(size for size, _ in sums.values())
        return RemotePart(path, generation, len(sums), nbytes, hashlib.sha256(text).hexdigest())

    def commit(self, copy: RemoteCheckpoint) -> None:
        """Complete a copy by writing its document. Call this after ``seal_part`` for all parts.

        Raises:
            UrlInUseError: Another process has made a copy in the meantime.
            RemoteError: The document cannot be written.
        """
        other_copies = [other for other in self.checkpoints() if other.number >= copy.number]
        if [(other.number, other.parts) for other in other_copies] == [(copy.number, copy.parts)]:
            return  # an earlier try wrote the document, but the response was lost
        if other_copies:
            raise UrlInUseError(
                f"{self.objects.title} received copy {other_copies[0].number} from another process meanwhile: two runs "
                "share it. End one of them, or name another URL in checkpoint.save_copy"
            )
        body = {
            "parts": [asdict(part) for part in copy.parts],
            "meta": dict(copy.checkpoint.meta),
            "lanes": copy.checkpoint.lanes,
            "elements": dict(copy.checkpoint.elements),
        }
        document = {"format": REMOTE_FORMAT, "sha256": _body_sha256(body), "body": body}
        self.objects.write(f"{copy.name}/{CHECKPOINT_NAME}", json.dumps(document, sort_keys=True).encode())
        if self._checkpoint(copy.name) is None:
            raise DamagedError(f"{self.objects.title}: '{copy.name}/{CHECKPOINT_NAME}' differs from the sent one")

    def prune(self, num_kept: int, best_step: int | None) -> None:
        """Remove older and incomplete copies. Keep the newest ``num_kept`` copies and the copy of ``best_step``.

        Only folders older than the newest copy are removed. Raises ``RemoteError``. Repeat the call to resume an
        interrupted removal.
        """
        copies = self.checkpoints()
        kept_names = [copy.name for copy in [copy for copy in copies if copy.step != best_step][:num_kept]]
        kept_names += [copy.name for copy in copies if copy.step == best_step][:1]
        for name in sorted(self._folders()):
            if name not in kept_names and copies and int(name[:8]) < copies[0].number:
                self.objects.remove_folder(name, CHECKPOINT_NAME)

    def problems(self, checkpoint: RemoteCheckpoint) -> Iterator[str]:
        """Read all objects of a copy. Yield a message about each object that is missing or damaged."""
        for part in checkpoint.parts:
            try:
                objects = self.list_objects(checkpoint, part)
            except DamagedError as error:
                yield str(error)
                continue
            for name, (nbytes, expected) in objects.items():
                full_name = "/".join(filter(None, (checkpoint.name, part.path, name)))
                try:
                    digest = self.objects.sha256(full_name, nbytes)
                except DamagedError as error:
                    yield str(error)
                    continue
                if digest != expected:
                    yield f"'{self.url}/{full_name}': its SHA-256 is {digest}, but was {expected}"

    def list_objects(self, checkpoint: RemoteCheckpoint, part: RemotePart) -> dict[str, tuple[int, str]]:
        """Return the objects of a rank's part: size and SHA-256 by name."""
        path = "/".join(filter(None, (checkpoint.name, part.path, OBJECTS_NAME)))
        text = self.objects.read(path)
        if text is None or hashlib.sha256(text).hexdigest() != part.sha256:
            raise DamagedError(f"'{self.url}/{path}' is {'missing' if text is None else 'damaged'}")
        objects: dict[str, tuple[int, str]] = {}
        try:
            for name, (nbytes, digest) in json.loads(text)["objects"].items():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
                    raise DamagedError(f"'{self.url}/{path}' names {name!r}, which would lie outside of the checkpoint")
                if not _is_count(nbytes) or not isinstance(digest, str):
                    raise TypeError(f"{name!r} has the size {nbytes!r:.40} and the checksum {digest!r:.80}")
                objects[name] = (nbytes, digest)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"'{self.url}/{path}' is invalid: {type(error).__name__}: {error}") from error
        return objects


def _parse_part(values: Mapping[str, Any]) -> RemotePart:
    """Return a rank's part of a copy. Raises ``TypeError`` or ``ValueError`` for invalid values."""
    part = RemotePart(**values)
    texts, counts = (part.path, part.sha256), (part.generation, part.num_objects, part.nbytes)
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_count, counts)):
        raise TypeError(f"a part of a copy has {texts} and {counts}")
    return part


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def settings_at_url(url: str) -> DecidedSettings | None:
    """Return the settings of the newest copy with a readable config, or None if none has. Raises ``RemoteError``."""
    all_settings = (DecidedSettings.of_meta(copy.checkpoint.meta) for copy in RemoteFolder(url).checkpoints())
    return next((settings for settings in all_settings if settings is not None), None)


class UrlInventory:
    """Inventory of the copies at a URL, with the interface of ``RunInventory``.

    Attributes:
        entries: Copies, oldest first.

    Raises:
        RemoteError: The URL cannot be read.
    """

    def __init__(self, url: str) -> None:
        self._url, self._folder = url, RemoteFolder(url)
        self._copies = self._folder.checkpoints()[::-1]
        self.entries = [InventoryEntry(copy.checkpoint, copy.nbytes) for copy in self._copies]

    def verify(self, step: int | None, on_block: OnBlock = lambda key: None) -> Iterator[Verified]:
        """Read every object of the copies, or of the copies of one step. Yield each copy with a list of its problems.

        ``on_block`` is never called, because objects are parts of blocks.

        Raises:
            RemoteError: The URL has no copy, or no copy of this step.
        """
        pairs = [pair for pair in zip(self.entries, self._copies, strict=True) if step in (None, pair[1].step)]
        if not pairs:
            steps = ", ".join(str(copy.step) for copy in self._copies) or "none"
            raise RemoteError(f"'{self._url}' holds no copy of this step. Its steps: {steps}")
        for entry, copy in pairs:
            yield entry, list(self._folder.problems(copy))

    def notices(self, entries: Iterable[InventoryEntry]) -> list[str]:
        """Return no notices, because copies at a URL have no drives."""
        return []
