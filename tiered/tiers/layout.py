"""The zarr v3 layout of blocks on a drive: documents, keys, and files of home slots."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiered.block import BlockSpec
from tiered.errors import TransferError
from tiered.tiers.base import Slot
from tiered.units import PAGE_BYTES, format_size

#: Version of ``attributes.megatrain``. Readers refuse newer versions.
FORMAT_VERSION = 1
ATTRIBUTES_KEY = "megatrain"
DOCUMENT_NAME = "zarr.json"

_ZARR_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
_RAW_NAMES = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. ``"bfloat16"``. ``dtype_from_name`` is the inverse."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype for a name that ``dtype_name`` returned.

    Raises:
        ValueError: this version of torch does not have the dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{name}' is not a dtype of torch {torch.__version__}")
    return dtype


def zarr_data_type(dtype: torch.dtype) -> str:
    """Return the zarr data type that stores ``dtype``: the same type, or an unsigned integer of the same size.

    zarr has no built-in bfloat16 or float8, so they are stored as ``uint16`` and ``uint8``. The attributes have the
    true name.
    """
    return _ZARR_NAMES.get(dtype) or _RAW_NAMES[dtype.itemsize]


def array_document(key: str, shape: Sequence[int], dtype: torch.dtype, chunk_bytes: int) -> dict[str, Any]:
    """Return the metadata document for a block's array.

    Args:
        shape: shape of the block, stored in the attributes. The array itself is 1-D.
        chunk_bytes: size of every chunk file, a multiple of 4096.
    """
    assert chunk_bytes > 0 and chunk_bytes % dtype.itemsize == 0, (key, chunk_bytes, dtype)
    return _array_document(key, shape, dtype, [math.prod(shape)], [chunk_bytes // dtype.itemsize])


def array_view_document(spec: BlockSpec, chunk_shape: Sequence[int]) -> dict[str, Any]:
    """Return the document for an array that has the block's shape and chunks of ``chunk_shape``."""
    return _array_document(spec.key, spec.shape, spec.dtype, spec.shape, chunk_shape)


def _array_document(
    key: str, shape: Sequence[int], dtype: torch.dtype, array_shape: Sequence[int], chunk_shape: Sequence[int]
) -> dict[str, Any]:
    data_type = zarr_data_type(dtype)
    # zarr does not allow a byte order for one-byte types.
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array_shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value(data_type),
        "codecs": [codec],
        "attributes": {
            ATTRIBUTES_KEY: {
                "format": FORMAT_VERSION,
                "key": key,
                "shape": list(shape),
                "logical_dtype": dtype_name(dtype),
            }
        },
    }


def group_document(attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the document for a group, with ``attributes`` stored under ``attributes.megatrain``."""
    own_fields = {} if attributes is None else {ATTRIBUTES_KEY: {"format": FORMAT_VERSION, **attributes}}
    return {"zarr_format": 3, "node_type": "group", "attributes": own_fields}


def own_attributes(document: object) -> dict[str, Any] | None:
    """Return the ``attributes.megatrain`` of a document, or None if no tier wrote the document."""
    if not isinstance(document, dict) or not isinstance(document.get("attributes"), dict):
        return None
    attributes = document["attributes"].get(ATTRIBUTES_KEY)
    return attributes if isinstance(attributes, dict) else None


def document_chunk_bytes(document: object) -> int | None:
    """Return the chunk file size in an ``array_document``. Return None for other or damaged documents."""
    attributes = own_attributes(document)
    if attributes is None or not isinstance(document, dict):
        return None
    try:
        num_elements = int(document["chunk_grid"]["configuration"]["chunk_shape"][0])
        nbytes = num_elements * dtype_from_name(attributes["logical_dtype"]).itemsize
    except (LookupError, TypeError, ValueError):
        return None
    return nbytes if nbytes > 0 and nbytes % PAGE_BYTES == 0 else None


def _fill_value(data_type: str) -> bool | int | float | list[float]:
    if data_type == "bool":
        return False
    if data_type.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if data_type.startswith("float") else 0


class ArrayKeys:
    """Keys in use in one tier. The caller holds the tier's lock."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._keys: set[str] = set()
        self._groups: Counter[str] = Counter()

    def check(self, key: str) -> None:
        """Raise ``ValueError`` if ``key`` is in use, is not a valid path, or is a parent or child of another key."""
        segments = key.split("/")
        if any(segment in ("", ".", "..", DOCUMENT_NAME) for segment in segments):
            raise ValueError(f"'{key}' cannot name files: no segment may be empty, '.', '..' or '{DOCUMENT_NAME}'")
        if key in self._keys:
            raise ValueError(f"tier '{self._tier}' already has a slot for '{key}'")
        parent = next((group for group in _parent_groups(key) if group in self._keys), None)
        if parent is not None or self._groups[key]:
            raise ValueError(f"'{key}': a block cannot be inside another block ('{parent or key + '/...'}')")

    def add(self, key: str) -> None:
        self._keys.add(key)
        self._groups.update(_parent_groups(key))

    def remove(self, key: str) -> None:
        self._keys.remove(key)
        self._groups.subtract(_parent_groups(key))


def _parent_groups(key: str) -> list[str]:
    """Return all parent groups of a key: ``a`` and ``a/b`` for ``a/b/c``."""
    segments = key.split("/")
    return ["/".join(segments[:end]) for end in range(1, len(segments))]


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One chunk file of an array.

    Attributes:
        path: path of the file. For a tier's slot, this is never a symbolic link.
        offset: byte offset of the file's contents in the block.
        path_index: index of the tier's path that has the file.
    """

    path: Path
    offset: int
    nbytes: int
    path_index: int = 0


@dataclass(slots=True)
class HomeFiles:
    """Resource of an NvmeTier's slot: the block's key, and its files ordered by offset.

    Only commits, adoptions of snapshots, and transfers that write the files change these attributes:

    Attributes:
        checksums: one checksum per piece (see ``tiered.file_io``), or None if unknown.
        is_flushed: whether the contents survive a power cut.
    """

    key: str
    chunk_bytes: int
    files: tuple[ChunkFile, ...]
    checksums: tuple[str, ...] | None = None
    is_flushed: bool = False

    @property
    def nbytes(self) -> int:
        return self.chunk_bytes * len(self.files)


def files_of(slot: Slot) -> HomeFiles:
    """Return the files of an NvmeTier's slot."""
    assert isinstance(slot.resource, HomeFiles), slot
    return slot.resource


def parts_of(files: Sequence[ChunkFile], start: int, stop: int) -> Iterator[tuple[Path, int, int, int]]:
    """Split bytes ``start`` to ``stop`` of a block by file. Yield (path, file start, file stop, block start)."""
    for file in files:
        begin, end = max(start, file.offset), min(stop, file.offset + file.nbytes)
        if begin < end:
            yield file.path, begin - file.offset, end - file.offset, begin


def place_text(files: Sequence[ChunkFile], start: int, stop: int) -> str:
    """Describe the files and byte ranges that hold bytes ``start`` to ``stop`` of a block, for a message."""
    parts = parts_of(files, start, stop)
    return ", ".join(f"'{os.path.realpath(path)}' bytes {begin} to {end}" for path, begin, end, _ in parts)


def allocation_error(error: OSError, tier: str, path: str, key: str, nbytes: int) -> TransferError:
    """Return the error for failing to create a new block's files. ``path`` is used if ``error`` names no file."""
    return TransferError(
        f"no files for {format_size(nbytes)} of block '{key}': {error.strerror}. Free space on the drive, "
        f"or give tier '{tier}' fewer bytes",
        tier=tier,
        path=str(error.filename or path),
        errno=error.errno,
    )
