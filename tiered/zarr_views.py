"""View of a committed generation as a read-only zarr group with one array per block. Reads are verified."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype

from tiered.block import BlockSpec
from tiered.tiers.layout import DOCUMENT_NAME, array_view_document, group_document
from tiered.units import MiB

#: Maximum size of a chunk in bytes. A chunk consists of whole rows, and has at least one row even if that row is
#: larger.
_CHUNK_BYTES = 64 * MiB


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block of a generation as an array.

    Attributes:
        read: function that returns bytes ``start`` to ``stop`` of the contents as 1-D uint8 in host memory. Raises an
            error if the bytes are damaged or missing.
    """

    spec: BlockSpec
    read: Callable[[int, int], torch.Tensor]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of each chunk: some rows, and the full size of all other axes. zarr requires sizes of at least 1."""
        shape = self.spec.shape
        if not shape:
            return ()
        row_bytes = math.prod(shape[1:]) * self.spec.dtype.itemsize
        rows = min(shape[0], max(1, _CHUNK_BYTES // max(1, row_bytes)))
        return tuple(max(1, size) for size in (rows, *shape[1:]))

    def chunk(self, indices: tuple[int, ...]) -> torch.Tensor:
        """Return the bytes of one chunk. The last chunk is padded with zeros, because zarr expects full chunks."""
        chunk_bytes = math.prod(self.chunk_shape) * self.spec.dtype.itemsize
        start = indices[0] * chunk_bytes if indices else 0
        data = self.read(start, min(start + chunk_bytes, self.spec.nbytes))
        return torch.nn.functional.pad(data, (0, chunk_bytes - data.numel()))


class _GenerationStore(Store):
    """Read-only zarr store that generates the documents and reads chunks from the blocks on request."""

    supports_writes: bool = False
    supports_deletes: bool = False
    supports_listing: bool = True

    def __init__(self, views: Iterable[BlockView], attributes: Mapping[str, Any]) -> None:
        super().__init__(read_only=True)
        self._views = {view.spec.key: view for view in views}
        self._documents = {DOCUMENT_NAME: group_document(attributes)}
        for key, view in self._views.items():
            folders = key.split("/")[:-1]
            for end in range(1, len(folders) + 1):
                self._documents.setdefault("/".join([*folders[:end], DOCUMENT_NAME]), group_document())
            self._documents[f"{key}/{DOCUMENT_NAME}"] = array_view_document(view.spec, view.chunk_shape)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = Store.__hash__

    def __repr__(self) -> str:
        return f"<{len(self._views)} blocks of a committed generation>"

    def _find_chunk(self, key: str) -> tuple[BlockView, tuple[int, ...]] | None:
        name, _, chunk = key.rpartition("/c/") if "/c/" in key else (key.removesuffix("/c"), "", "")
        view = self._views.get(name)
        if view is None or view.spec.nbytes == 0 or not key.startswith(f"{name}/c"):
            return None
        indices = tuple(int(index) for index in chunk.split("/")) if chunk else ()
        return (view, indices) if indices in self._indices(view) else None

    @staticmethod
    def _indices(view: BlockView) -> list[tuple[int, ...]]:
        shape = view.spec.shape
        if not shape:
            return [()]
        num_chunks = math.ceil(shape[0] / view.chunk_shape[0]) if view.spec.nbytes else 0
        return [(index, *(0 for _ in shape[1:])) for index in range(num_chunks)]

    def _value(self, key: str) -> torch.Tensor | bytes | None:
        if key in self._documents:
            return json.dumps(self._documents[key]).encode()
        location = self._find_chunk(key)
        return None if location is None else location[0].chunk(location[1])

    def _get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        value = self._value(key)
        if value is None:
            return None
        buffer = cpu.Buffer.from_bytes(value) if isinstance(value, bytes) else cpu.Buffer.from_array_like(value.numpy())
        return prototype.buffer.from_buffer(buffer[range_of(len(buffer), byte_range)])

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await asyncio.to_thread(self._get, key, prototype or default_buffer_prototype(), byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return key in self._documents or self._find_chunk(key) is not None

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        for key in self._documents:
            yield key
        for key, view in self._views.items():
            for indices in self._indices(view):
                yield "/".join([key, "c", *map(str, indices)])

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        folder = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
        names = [key.removeprefix(folder).split("/")[0] async for key in self.list_prefix(folder)]
        for name in dict.fromkeys(names):
            yield name


def group_of(views: Iterable[BlockView], attributes: Mapping[str, Any]) -> zarr.Group:
    """Return a read-only group with one array per block. ``attributes`` appear under ``attributes.megatrain``."""
    return zarr.open_group(_GenerationStore(views, attributes), mode="r")


def range_of(nbytes: int, byte_range: ByteRequest | None) -> slice:
    """Return the slice of a value's bytes that ``byte_range`` requests.

    Raises:
        ValueError: the type of ``byte_range`` is unknown.
    """
    match byte_range:
        case None:
            return slice(0, nbytes)
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, nbytes)
        case SuffixByteRequest(suffix):
            return slice(max(0, nbytes - suffix), nbytes)
    raise ValueError(f"Unexpected byte_range, got {byte_range}")
