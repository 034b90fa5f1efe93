"""A tier of objects in S3, GCS, a local folder or any other fsspec file system, in one file outside the package.

fsspec, which comes with torch, implements the protocols; some of them need another package (``s3fs`` for ``s3://``). A
store uses this tier as its slowest tier::

    objects = ObjectStoreTier("s3://bucket/scratch", 1 * tiered.TiB, storage_options={"profile": "me"})
    tiered.TieredStore([tiered.RamTier(8 * tiered.GiB), objects], path="generations")

Every tier writes to a separate folder, and deletes the folder when the tier is closed. A killed process leaves its
folder behind; a lifecycle rule of the bucket can remove it. Checksums are kept in memory and compared on every read.
"""

from __future__ import annotations

import contextlib
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import torch

import tiered
from tiered.ext import Ledger, Link, Slot, ThreadedLink, Tier, TierUsage


@dataclass(eq=False)
class Objects:
    """Resource of a slot: folder of the block's objects (one per part), whether objects exist, and their checksums."""

    key: str
    folder: str
    was_put: bool = False
    checksums: list[int] = field(default_factory=list)


class ObjectStoreTier:
    """Tier with at most ``capacity_bytes`` of objects below a URL. It holds only homes, and only its links access them.

    Args:
        url: fsspec URL of a bucket or a folder.
        capacity_bytes: Limit of the total size of all objects.
        part_bytes: Maximum size of one object. A transfer needs memory for one part, in addition to the slots.
        num_connections: Number of parts in progress at once in each direction.
        storage_options: Options of fsspec's file system, such as credentials or an endpoint.
    """

    alignment_bytes = 1
    device: torch.device | None = None
    durable = False  # a commit writes the contents to the store's path instead

    def __init__(
        self,
        url: str,
        capacity_bytes: int,
        *,
        name: str = "objects",
        part_bytes: int = 64 * tiered.MiB,
        num_connections: int = 4,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._ledger = Ledger(name, capacity_bytes)
        self._files, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
        self._root = f"{root.rstrip('/')}/tiered-{uuid.uuid4().hex}"
        self._part_bytes = part_bytes
        self._num_connections = num_connections
        self._has_objects = False

    # -- methods of every tier ---------------------------------------------------------------------------------

    def slot_bytes(self, nbytes: int) -> int:
        return nbytes

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        assert home, f"tier '{self.name}' holds homes only, not a copy of '{name}'"
        if not self._ledger.take(nbytes):
            return None
        return Slot(self.name, nbytes, nbytes, Objects(name, f"{self._root}/{name}"))

    def free(self, slot: Slot) -> None:
        """Delete the objects of a slot. After a ``TransferError``, the objects still count toward the capacity."""
        objects = objects_of(slot)
        try:
            for path, _ in self._parts(slot) if objects.was_put else ():
                with contextlib.suppress(FileNotFoundError):  # a put failed, or an earlier attempt deleted the object
                    self._files.rm_file(path)
        except OSError as error:
            text = f"block '{objects.key}' cannot be deleted: {error}"
            raise tiered.TransferError(text, tier=self.name, path=objects.folder, errno=error.errno) from error
        slot.resource = None
        self._ledger.give(slot.slot_bytes)

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise tiered.TieredError(f"tier '{self.name}' is not addressable: fetch the block into a faster tier first")

    def reserve(self, nbytes: int) -> None:
        self._ledger.reserve(nbytes)

    def sync(self) -> None:
        """Do nothing: uploaded objects are already persistent."""

    def usage(self) -> TierUsage:
        return self._ledger.usage()

    def close(self) -> None:
        """Delete all remaining objects. Idempotent."""
        if self._has_objects:
            self._has_objects = False
            with contextlib.suppress(FileNotFoundError):  # free() has deleted all objects
                self._files.rm(self._root, recursive=True)

    # -- methods of optional protocols ---------------------------------------------------------------------------------

    def links_with(self, neighbour: Tier) -> list[Link] | None:
        """Return the links to a tier in host memory, or None for any other tier."""
        if neighbour.device is None or neighbour.device.type != "cpu":
            return None

        def put(source: Slot, target: Slot, nbytes: int) -> None:
            self._put(neighbour.tensor(source, (nbytes,), torch.uint8), target)

        def get(source: Slot, target: Slot, nbytes: int) -> None:
            self._get(source, neighbour.tensor(target, (nbytes,), torch.uint8))

        way, num = self._protocol(), self._num_connections
        return [
            ThreadedLink(neighbour.name, self.name, put, path=way, num_threads=num),
            ThreadedLink(self.name, neighbour.name, get, path=way, num_threads=num),
        ]

    def _protocol(self) -> str:
        protocol = self._files.protocol
        return str(protocol if isinstance(protocol, str) else protocol[0])

    # -- the bytes ---------------------------------------------------------------------------------------------

    def _parts(self, slot: Slot) -> Iterator[tuple[str, slice]]:
        """Yield the path of each object and the slice of the block that it holds."""
        for number, start in enumerate(range(0, slot.nbytes, self._part_bytes)):
            stop = min(start + self._part_bytes, slot.nbytes)
            yield f"{objects_of(slot).folder}/{number:06d}", slice(start, stop)

    def _put(self, contents: torch.Tensor, slot: Slot) -> None:
        objects_of(slot).was_put = self._has_objects = True
        if self._protocol() == "file":  # buckets have no folders
            self._files.makedirs(objects_of(slot).folder, exist_ok=True)
        checksums = []
        for path, part in self._parts(slot):
            data = contents[part].numpy().tobytes()
            self._files.pipe_file(path, data)
            checksums.append(zlib.crc32(data))
        objects_of(slot).checksums = checksums

    def _get(self, slot: Slot, contents: torch.Tensor) -> None:
        objects = objects_of(slot)
        for (path, part), expected in zip(self._parts(slot), objects.checksums, strict=True):
            data = bytearray(self._files.cat_file(path))
            found = zlib.crc32(data)
            if found != expected or len(data) != part.stop - part.start:
                place = f"object '{path}' of {len(data)} bytes"
                raise tiered.CorruptBlockError(objects.key, f"{expected:08x}", f"{found:08x}", place=place)
            contents[part].copy_(torch.frombuffer(data, dtype=torch.uint8))


def objects_of(slot: Slot) -> Objects:
    """Return the objects of a slot of this tier."""
    assert isinstance(slot.resource, Objects), slot
    return slot.resource
